"""The contiguous KV cache: each sequence reserves one unbroken stretch of a slab for all it may ever need.

This is how servers kept K/V before paging.  The price shows in `spans()`: a stretch is taken for the longest
possible answer, most of it stays empty, and the gaps between stretches fit nobody.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from common.attention import attend
from common.batch import ForwardBatch, Scheduled
from common.config import EngineConfig
from common.errors import InvalidValue
from common.model.config import ModelConfig
from common.protocol import KVUsage, Model, Request, Span
from common.sequence import Sequence


@dataclass
class Stretch:
    """Slots `start ... start + size - 1`, all of one sequence."""

    start: int
    size: int
    seq: Sequence


class ContiguousCache:
    """One slab of token slots for K and one for V, handed out first-fit."""

    def __init__(self, model: Model, config: EngineConfig) -> None:
        self.model: ModelConfig = model.config
        self.config = config
        self.bytes_per_token = model.config.kv_bytes_per_token(model.dtype)
        self.capacity = config.kv_bytes // self.bytes_per_token  # token slots
        if not self.capacity:
            raise InvalidValue("kv_bytes", config.kv_bytes, f"at least {self.bytes_per_token}, one token")
        self.max_len = config.max_model_len  # whoever is let in has room to the end
        shape = (self.model.num_layers, self.capacity, self.model.num_kv_heads, self.model.head_dim)
        self.k = torch.empty(shape, dtype=model.dtype, device=model.device)  # [L, slots, Hkv, D]
        self.v = torch.empty(shape, dtype=model.dtype, device=model.device)  # [L, slots, Hkv, D]
        self.stretches: list[Stretch] = []  # in slot order, never overlapping
        self.starts: list[int] = []  # of the sequences in this forward

    def reservation(self, request: Request) -> int:
        """Slots that one answer to the request sets aside, under the configured policy."""
        longest, max_tokens = self.config.max_model_len, request.params.max_tokens
        if self.config.reservation == "max_model_len" or max_tokens is None:
            return longest
        return min(len(request.prompt_token_ids) + max_tokens, longest)

    def check_fits(self, request: Request) -> None:
        """Raise InvalidValue if even an empty slab could not take the request."""
        need = self.reservation(request)
        if need > self.capacity:
            raise InvalidValue(
                "kv_bytes",
                self.config.kv_bytes,
                f"at least {need * self.bytes_per_token} for this request: reservation "
                f"'{self.config.reservation}' asks for {need} tokens x {self.bytes_per_token} bytes, "
                f"and {self.capacity} tokens fit",
            )

    def allocate(self, seq: Sequence) -> int | None:
        """Reserve the first gap that is long enough; its start, or None if there is no such gap."""
        size, start = self.reservation(seq.request), 0
        for position, stretch in enumerate(self.stretches):
            if stretch.start - start >= size:
                self.stretches.insert(position, Stretch(start, size, seq))
                return start
            start = stretch.start + stretch.size
        if self.capacity - start < size:
            return None
        self.stretches.append(Stretch(start, size, seq))
        return start

    def free(self, seq: Sequence) -> None:
        """Give a sequence's stretch back; a no-op if it has none."""
        self.stretches = [stretch for stretch in self.stretches if stretch.seq is not seq]

    def prepare(self, batch: ForwardBatch, scheduled: Scheduled) -> None:
        """Slot of a token = start of its sequence's stretch + its position."""
        start_of = {id(stretch.seq): stretch.start for stretch in self.stretches}
        self.starts = [start_of[id(seq)] for seq, _ in scheduled]
        first_slots = torch.from_numpy(np.repeat(np.array(self.starts), batch.query_lens))  # [T]
        batch.slot_mapping = batch.positions + first_slots  # [T]

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """See `KVBackend.attend`; a sequence's whole K/V is one slice of the slab."""
        keys, values = self.k[layer], self.v[layer]  # [slots, Hkv, D]
        keys.index_copy_(0, batch.slot_mapping, k)
        values.index_copy_(0, batch.slot_mapping, v)
        scale, window = self.model.attention_scale, self.model.window(layer)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)  # [T, Hq, D]
        row = 0
        for start, length, context in zip(self.starts, batch.query_lens, batch.context_lens, strict=True):
            rows, slots = slice(row, row + length), slice(start, start + context)
            out[rows] = attend(q[rows], keys[slots], values[slots], scale, window)
            row += length
        return out.view(q.shape[0], -1)  # [T, Hq * D]

    def usage(self) -> KVUsage:
        """Count of slots now."""
        return KVUsage(
            capacity=self.capacity,
            reserved=sum(stretch.size for stretch in self.stretches),
            used=sum(stretch.seq.num_computed_tokens for stretch in self.stretches),
            bytes_per_token=self.bytes_per_token,
        )

    def spans(self) -> list[Span]:
        """Each sequence's stretch now, in slot order."""
        return [
            Span(s.seq.request_id, s.seq.index, s.start, s.size, s.seq.num_computed_tokens)
            for s in self.stretches
        ]
