"""A model whose K/V say where they come from: layer 0 a token and its position, layer 1 everything before it.

Queries are zero, so attention is the mean over all that a sequence has.  One wrong or missing entry changes the
answer, and what lies in the cache can be compared with what must lie there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from support.scripted import VOCAB, scripted_config

from common.batch import Scheduled
from common.model.config import ModelConfig
from common.protocol import Engine, SampledToken
from common.sequence import Sequence

SIZE = 8
LONGEST = 256


def table(seed: int, *shape: int) -> torch.Tensor:
    """Random numbers that are always the same."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@dataclass
class TaggedModel:
    """Two layers, one head of 8; attention is all there is."""

    config: ModelConfig = field(
        default_factory=lambda: scripted_config(num_layers=2, eos_token_ids=frozenset())
    )
    dtype: torch.dtype = torch.float64
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        self.tokens, self.places = table(0, VOCAB, SIZE), table(1, LONGEST, SIZE)
        self.head = table(2, SIZE, VOCAB)

    def tags(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """A token at a place: `[T, D]`."""
        return (self.tokens[ids] * self.places[positions]).to(self.dtype)

    def forward(self, batch, kv) -> torch.Tensor:
        """See `Model.forward`."""
        tags = self.tags(batch.input_ids, batch.positions)[:, None]  # [T, 1, D]
        q = torch.zeros_like(tags)  # [T, 1, D]
        means = kv.attend(0, q, tags, tags, batch).view(-1, 1, SIZE)  # [T, 1, D]
        means = kv.attend(1, q, means, means, batch)  # [T, D]
        mixed = tags[:, 0] + 5 * means  # [T, D], what it is and where it comes from
        return mixed[batch.logits_rows] @ self.head.to(self.dtype)  # [R, V]

    def check_cache(self, engine: Engine, seq: Sequence) -> None:
        """All computed tokens of a sequence lie in its blocks, in both layers."""
        count, kv = seq.num_computed_tokens, engine.kv
        if not count:
            return
        positions = torch.arange(count)  # [S]
        size = engine.config.block_size
        slots = torch.tensor(seq.block_table)[positions // size] * size + positions % size  # [S]
        expected = self.tags(torch.tensor(seq.token_ids[:count]), positions)  # [S, D]
        for k_cache, v_cache in kv.layers:
            for cache in (k_cache, v_cache):
                torch.testing.assert_close(kv.kernel.gather(cache, slots)[:, 0], expected)
            expected = expected.cumsum(0) / (positions + 1)[:, None]  # [S, D], what attention makes of it


class Ending:
    """An executor that ends answer `index` of a request with its `lengths[index]`th token."""

    def __init__(self, engine: Engine, lengths: tuple[int, ...]) -> None:
        self.inner, self.lengths = engine.executor, lengths
        engine.executor = self

    def execute(self, scheduled: Scheduled) -> list[SampledToken | None]:
        """See `Executor.execute`."""
        drawn = self.inner.execute(scheduled)
        ends = [seq.num_output_tokens + 1 == self.lengths[seq.index] for seq, _ in scheduled]
        return [SampledToken(2) if token and end else token for token, end in zip(drawn, ends, strict=True)]
