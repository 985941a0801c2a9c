"""Executors that make a run end where its trace says, or run without a model at all."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import torch

from common.batch import ForwardBatch, Scheduled
from common.model.config import ModelConfig
from common.protocol import Executor, KVBackend, SampledToken
from common.sequence import Sequence


class ScriptedLengths:
    """Ends each answer at its trace's length, by an end-of-sequence token in the last place.

    This is the honest way to replay a trace: to the engine it looks like a model that has said all it had to
    say.  `max_tokens` stays the client's guess, so no stage can reserve by a length that nobody knows.

    Args:
        inner: draws the tokens; an end that it draws too early becomes another token.
        output_lens: request id -> tokens of the answer.
        config: whose `eos_token_ids` end an answer.
        answers: request id -> what the model is made to say before that end; where a later prompt repeats an
            answer, it is this one in every run.
    """

    def __init__(
        self,
        inner: Executor,
        output_lens: Mapping[str, int],
        config: ModelConfig,
        answers: Mapping[str, Seq[int]] | None = None,
    ) -> None:
        self.inner = inner
        self.output_lens = output_lens
        self.answers = answers or {}
        self.ends = config.eos_token_ids
        self.end = min(config.eos_token_ids)
        self.other = next(token for token in range(config.vocab_size) if token not in config.eos_token_ids)

    def execute(self, scheduled: Scheduled) -> list[SampledToken | None]:
        """See `Executor.execute`."""
        drawn = self.inner.execute(scheduled)
        return [
            token and self._scripted(seq, token) for (seq, _), token in zip(scheduled, drawn, strict=True)
        ]

    def _scripted(self, seq: Sequence, token: SampledToken) -> SampledToken:
        if seq.num_output_tokens + 1 == self.output_lens[seq.request_id]:
            return replace(token, token_id=self.end)
        if seq.request_id in self.answers:
            return replace(token, token_id=self.answers[seq.request_id][seq.num_output_tokens])
        return replace(token, token_id=self.other) if token.token_id in self.ends else token


class CountingExecutor:
    """No model: every sequence that has caught up gets token 0.

    Memory and schedule of an engine do not depend on which tokens are drawn, so thousands of requests can be
    replayed in seconds.
    """

    def execute(self, scheduled: Scheduled) -> list[SampledToken | None]:
        """See `Executor.execute`."""
        return [SampledToken(0) if seq.num_computed_tokens + n == len(seq.token_ids) else None
                for seq, n in scheduled]  # fmt: skip


@dataclass
class ShapeOnly:
    """A model that has a shape and no weights; its KV tensors, on the `meta` device, take no memory."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device = field(default_factory=lambda: torch.device("meta"))

    def forward(self, batch: ForwardBatch, kv: KVBackend) -> torch.Tensor:
        """There is nothing to run."""
        raise NotImplementedError("a model without weights: give the engine a CountingExecutor")
