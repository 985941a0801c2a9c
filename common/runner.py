"""The executor that runs the real model: pack, forward, sample."""

from __future__ import annotations

import torch

from common.batch import ForwardBatch, Scheduled
from common.config import EngineConfig
from common.graphs import decode_graphs
from common.protocol import KVBackend, Model, SampledToken
from common.sampling import gather_logprobs, sample
from common.sequence import Sequence


class ModelExecutor:
    """One model and one KV backend; each `execute` is one forward.

    Args:
        model: computes.
        kv: remembers.
        config: given by stages whose decode steps can be recorded and replayed, see `graphs.py`.
    """

    def __init__(self, model: Model, kv: KVBackend, config: EngineConfig | None = None) -> None:
        self.model = model
        self.kv = kv
        self.graphs = None if config is None else decode_graphs(model, kv, config)

    @torch.inference_mode()
    def execute(self, scheduled: Scheduled) -> list[SampledToken | None]:
        """Run one forward and draw a token for each sequence that has caught up, None for the others."""
        batch = ForwardBatch.pack(scheduled)
        self.kv.prepare(batch, scheduled)
        if self.graphs is not None and self.graphs.takes(batch):
            logits = self.graphs.forward(batch)  # [B, V], until the next forward
        else:
            logits = self.model.forward(batch.to(self.model.device), self.kv)  # [R, V]
        last_rows: list[int] = []
        ready: list[Sequence] = []
        row = 0
        for seq, num_new in scheduled:
            caught_up = seq.num_computed_tokens + num_new == len(seq.token_ids)
            if seq.wants_prompt_logprobs:
                _score_prompt(seq, num_new, logits[row : row + num_new])
                row += num_new
            else:
                row += caught_up
            if caught_up:
                ready.append(seq)
                last_rows.append(row - 1)
        if len(last_rows) != logits.shape[0]:
            logits = logits[last_rows]  # [R, V] without the rows that only score prompts
        tokens = iter(sample(logits, ready, self.model.config.eos_token_ids) if ready else [])
        return [next(tokens) if seq.num_computed_tokens + n == len(seq.token_ids) else None
                for seq, n in scheduled]  # fmt: skip


def _score_prompt(seq: Sequence, num_new: int, logits: torch.Tensor) -> None:
    """Append the log probabilities of the prompt tokens that this chunk's rows predict.

    Row j (position `num_computed_tokens + j`) predicts the token after it; rows scored before (a prompt that
    is recomputed after losing its memory) and the last position's prediction are left out.
    """
    scores = seq.prompt_logprobs
    if not scores:
        scores.append(None)  # nothing precedes the first token
    first = seq.num_computed_tokens
    end = min(first + num_new, seq.num_prompt_tokens - 1)
    start = len(scores) - 1  # the position that predicts the next unscored token
    if start < end:
        targets = seq.token_ids[start + 1 : end + 1]
        count = seq.params.prompt_logprobs or 0
        scores.extend(gather_logprobs(logits[start - first : end - first], targets, count))
