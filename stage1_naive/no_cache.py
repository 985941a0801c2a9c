"""The KV backend that remembers nothing: each forward brings the whole sequence along."""

from __future__ import annotations

import torch

from common.attention import attend
from common.batch import ForwardBatch, Scheduled
from common.model.config import ModelConfig
from common.protocol import KVUsage, Request, Span


class NoCache:
    """Full causal attention over the K/V of this very forward, which is dropped right after."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model
        self.max_len = model.max_position_embeddings

    def prepare(self, batch: ForwardBatch, scheduled: Scheduled) -> None:
        """Check that nothing of a sequence was left out: what is not in this forward does not exist."""
        if batch.query_lens != batch.context_lens:
            raise ValueError("a stage without a cache must compute each sequence from its first token")

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """See `KVBackend.attend`; each sequence's rows of q, k and v are all there is of it."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format)  # [T, Hq, D]
        row = 0
        for length in batch.query_lens:
            rows = slice(row, row + length)
            out[rows] = attend(
                q[rows], k[rows], v[rows], self.model.attention_scale, self.model.window(layer)
            )
            row += length
        return out.view(q.shape[0], -1)  # [T, Hq * D]

    def check_fits(self, request: Request) -> None:
        """Whatever fits the context fits: there is nothing to run out of."""

    def usage(self) -> KVUsage:
        """Nothing is kept."""
        return KVUsage(capacity=0, reserved=0, used=0, bytes_per_token=0)

    def spans(self) -> list[Span]:
        """Nothing is kept."""
        return []
