"""Attention of prompts, or long chunks of them: in tiles, or where the processor cannot, by torch.

Here arithmetic takes the time, and tiles do it at two thirds of the speed of linear layers: see `cpu_units.py`.
Where blocks are not made of lines (`cpu_layout.py`), those of a sequence are copied to one piece first, and torch's own
attention does the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from common.attention import attend
from common.compiled import LANES, LIKE, share_threads
from stage3_paged.kernels.cpu_blocks import copy_blocks
from stage3_paged.kernels.cpu_layout import numbers_per_word
from stage3_paged.kernels.cpu_units import WIDE, attend_units
from stage3_paged.kernels.reference import log_sum_exp

FOREVER = 1 << 62
"""A window wider than any context."""

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""To copy numbers only their bits matter, and numba knows no bfloat16."""


def attend_long_queries(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: Sequence[tuple[torch.Tensor, int, int, int]],
    scale: float,
    window: int | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Attend for each of some sequences.

    Args:
        q: `[T, Hq, D]`; the rows of a token in one piece, tokens may lie apart.
        keys: `[N, Hkv, D, bs]`, contiguous.
        values: `[N, Hkv, bs, D]`, contiguous.
        batch: (block table, first row, number of queries, context length) of each sequence.
        scale: factor on the scores.
        window: sliding window.
        out: `[T, Hq, D]`, contiguous; only rows of these sequences are written.
        lse: `[T, Hq]` or None; likewise.
    """
    if numbers_per_word(q.dtype, *values.shape[2:]) > 0:
        addresses = [(table.data_ptr(), *rest) for table, *rest in batch]
        attend_in_tiles(q, keys, values, addresses, scale, window, out, lse)
        return
    for table, row, num_queries, length in batch:
        rows = slice(row, row + num_queries)
        first = 0 if window is None else max(0, length - num_queries - window + 1)
        k, v = copy_to_one_piece(keys, values, table, first, length)  # each [S - first, Hkv, D]
        out[rows] = attend(q[rows], k, v, scale, window)  # [Tq, Hq, D]
        if lse is not None:
            lse[rows] = log_sum_exp(q[rows], k, scale, window)  # [Tq, Hq]


def copy_to_one_piece(
    keys: torch.Tensor, values: torch.Tensor, block_table: torch.Tensor, first: int, last: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy positions `first ... last - 1` of one sequence out of its blocks: K and V, each `[n, Hkv, D]`."""
    _, num_kv_heads, head_size, _ = keys.shape
    shape = (num_kv_heads, last - first, head_size)
    k, v = torch.empty(shape, dtype=keys.dtype), torch.empty(shape, dtype=keys.dtype)  # [Hkv, n, D]
    bits = BITS[keys.element_size()]
    arrays = (array.view(bits).numpy() for array in (keys, values, k, v))
    copy_blocks(*arrays, block_table.numpy(), first)
    return k.transpose(0, 1), v.transpose(0, 1)  # [n, Hkv, D]


def attend_in_tiles(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: Sequence[Sequence[int]],
    scale: float,
    window: int | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Attend for each of some sequences, whose blocks are made of lines.

    Args:
        q: `[T, Hq, D]`; the rows of a token in one piece, tokens may lie apart.
        keys: `[N, Hkv, D, bs]`, contiguous, in lines.
        values: `[N, Hkv, bs, D]`, likewise.
        batch: as of `attend_long_queries`, the block table by its address: `[max blocks]` int32, contiguous, its
            blocks within the cache.
        scale: factor on the scores, above 0.
        window: sliding window.
        out: `[T, Hq, D]`, contiguous; written.
        lse: `[T, Hq]` float32, contiguous, or None; written.
    """
    num_heads, head_size = q.shape[1:]
    num_kv_heads, block_size = values.shape[1:3]
    fields = np.array(batch)  # [B, 4]
    num_tokens, length = fields[:, 2], fields[:, 3]  # each [B]
    first = np.zeros_like(length) if window is None else np.maximum(0, length - num_tokens - window + 1)
    first -= first % block_size
    counts = 2 * -(-(length - first) // LANES)  # addresses of strips, [B]
    strips = np.empty(counts.sum(), np.int64)
    at = strips.ctypes.data + (counts.cumsum() - counts) * strips.itemsize  # [B]
    fields = np.column_stack((fields, first, at))  # [B, FIELDS]
    attend_units(
        LIKE[q.dtype],
        (0,) * numbers_per_word(q.dtype, block_size, head_size),
        (0,) * math.gcd(head_size // LANES, WIDE),
        *(q.data_ptr(), q.stride(0) * q.itemsize, out.data_ptr(), 0 if lse is None else lse.data_ptr()),
        *(keys.data_ptr(), values.data_ptr(), fields.ctypes.data, len(fields)),
        (num_heads, num_kv_heads, head_size, block_size),
        np.float32(scale * math.log2(math.e)),
        np.float32(math.log(2)),
        window or FOREVER,
        share_threads(),
    )
