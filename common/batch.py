"""The packed arrays of one forward: many sequences laid end to end, without padding.

Shape letters, used in every comment of this project:

    T    packed tokens of one forward (all sequences together)
    B    sequences in the forward
    S    context length of one sequence (tokens before and in this forward)
    R    rows whose logits are wanted
    Hq   query heads          Hkv  key/value heads       D  head size
    V    vocabulary (logit width)                        L  layers
    N    KV blocks            bs   block size (tokens per block)
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from copy import copy
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from common.sequence import Sequence

Scheduled = Seq[tuple["Sequence", int]]
"""What a scheduler decides: (sequence, how many of its next tokens to compute), in batch order."""


@dataclass
class ForwardBatch:
    """One forward's input.  Row t of every `[T]` array belongs to the same token.

    Sequence b owns rows `query_start[b] : query_start[b + 1]`; they are its tokens at positions
    `seq_lens[b] - query_lens[b] ... seq_lens[b] - 1`.  A decode is a query of length 1, a chunk of a prompt
    a longer one; nothing else tells them apart.
    """

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    query_start: torch.Tensor  # [B + 1] int32
    seq_lens: torch.Tensor  # [B] int32, context length with this forward's tokens
    logits_rows: torch.Tensor  # [R] int64, rows of T whose logits are wanted
    query_lens: list[int]  # the host's copy of diff(query_start): loops need no sync
    context_lens: list[int]  # the host's copy of seq_lens; empty where a graph is captured, which outlives it
    slot_mapping: torch.Tensor  # [T] int64, where the cache stores each token's K/V; empty without a cache
    block_tables: torch.Tensor  # [B, max blocks] int32; empty without blocks
    attention_plan: object | None = None  # the cache's, if it attends otherwise than row by row (stage 5)

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.input_ids.shape[0]

    @property
    def num_seqs(self) -> int:
        """B."""
        return len(self.query_lens)

    @classmethod
    def pack(cls, scheduled: Scheduled) -> ForwardBatch:
        """Lay the next tokens of each sequence end to end, on the host.

        Logits are wanted for the last row of a sequence that has caught up (an unfinished chunk predicts a
        token that is already known), and for every row of a prompt whose `prompt_logprobs` were asked for.
        """
        query = np.array([n for _, n in scheduled], dtype=np.int64)  # [B]
        computed = np.array([s.num_computed_tokens for s, _ in scheduled], dtype=np.int64)  # [B]
        start = np.zeros(len(query) + 1, dtype=np.int64)  # [B + 1]
        np.cumsum(query, out=start[1:])
        total = int(start[-1])
        ids = np.fromiter(
            chain.from_iterable(
                s.token_ids[s.num_computed_tokens : s.num_computed_tokens + n] for s, n in scheduled
            ),
            dtype=np.int64,
            count=total,
        )  # [T]
        positions = np.arange(total) + np.repeat(computed - start[:-1], query)  # [T]
        context = computed + query  # [B]
        put = torch.from_numpy
        return cls(
            input_ids=put(ids),
            positions=put(positions),
            query_start=put(start.astype(np.int32)),
            seq_lens=put(context.astype(np.int32)),
            logits_rows=put(_logits_rows(scheduled, start, context)),
            query_lens=query.tolist(),
            context_lens=context.tolist(),
            slot_mapping=put(start[:0]),  # the KV backend's `prepare` fills in these two
            block_tables=torch.empty(0, dtype=torch.int32),
        )

    def to(self, device: torch.device) -> ForwardBatch:
        """The same batch on the model's device; itself if that is the CPU."""
        if device.type == "cpu":
            return self
        moved = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(moved, name, staged(value, device).to(device, non_blocking=True))
        return moved


def _logits_rows(scheduled: Scheduled, start: np.ndarray, context: np.ndarray) -> np.ndarray:
    """`[R]` int64: the last row of each sequence that has caught up, all rows of one that is to be scored."""
    wanted = np.array([len(s.token_ids) for s, _ in scheduled], dtype=np.int64) == context  # [B]
    if not any(s.wants_prompt_logprobs for s, _ in scheduled):
        return start[1:][wanted] - 1
    rows = np.zeros(start[-1], dtype=bool)  # [T]
    rows[start[1:][wanted] - 1] = True
    for (seq, _), first, end in zip(scheduled, start, start[1:], strict=False):
        rows[first:end] |= seq.wants_prompt_logprobs
    return np.flatnonzero(rows)


def staged(array: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host array where a GPU can fetch it by itself: in pinned memory.

    From there `non_blocking` copies go on while the host does; torch keeps the memory until they are done.
    """
    return array.pin_memory() if device.type == "cuda" else array
