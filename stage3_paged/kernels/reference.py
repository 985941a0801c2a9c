"""Paged attention as plainly as it can be said: gather a sequence's blocks, then attend.

The oracle of the fast kernels, and the first thing to read.  A sequence's tokens lie in blocks anywhere in
the cache; its block table says where:

    position 37, blocks of 16:   block_table[37 // 16] = block_table[2] -> block 9;   37 % 16 -> its slot 5
"""

from __future__ import annotations

import torch

from common.attention import attend
from stage3_paged.kernels.checks import check_attention, check_block_size, check_store


def make_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one layer, each `[N, bs, Hkv, D]`; what a slot holds before its first write is undefined."""
    check_block_size(block_size)
    shape = (num_blocks, block_size, num_kv_heads, head_size)
    return torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write K and V of T tokens to their slots (`slot = block * block size + offset`).

    Args:
        k: `[T, Hkv, D]`.
        v: `[T, Hkv, D]`.
        k_cache: `[N, bs, Hkv, D]`, written in place.
        v_cache: `[N, bs, Hkv, D]`, written in place.
        slot_mapping: `[T]` int64, all different.

    Raises:
        InvalidValue: shapes, dtypes or layouts that do not fit together.
    """
    check_store(k, v, k_cache, v_cache, slot_mapping)
    block_size = k_cache.shape[1]
    block, offset = slot_mapping // block_size, slot_mapping % block_size  # [T], [T]
    k_cache[block, offset] = k
    v_cache[block, offset] = v


def gather(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Read slots `[n]` of a cache back: `[n, Hkv, D]`."""
    block_size = cache.shape[1]
    return cache[slots // block_size, slots % block_size]  # [n, Hkv, D]


def paged_attention(  # noqa: PLR0913, PLR0917
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int | None = None,
    out: torch.Tensor | None = None,
    query_lens: list[int] | None = None,
    context_lens: list[int] | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with the last positions of each sequence over all that its blocks hold.

    Args:
        q: `[T, Hq, D]`; rows `query_start[b] : query_start[b + 1]` are the last positions of sequence b.
        k_cache: `[N, bs, Hkv, D]`, the new tokens stored already.
        v_cache: `[N, bs, Hkv, D]`.
        block_tables: `[B, max blocks]` int32; what follows a sequence's last block is never read.
        query_start: `[B + 1]` int32.
        seq_lens: `[B]` int32, context lengths with the new tokens.
        scale: factor on the scores, above 0.
        window: see only this many latest positions, itself included.
        out: `[T, Hq, D]` to write to; a new tensor if None.
        query_lens: the host's copy of diff(query_start).
        context_lens: the host's copy of seq_lens.
        lse: `[T, Hq]` to write the logarithm of each softmax's sum to, float32 (float64 for float64): what it
            takes to join the results over two parts of a context (stage 5).

    Returns:
        `[T, Hq, D]`.

    Raises:
        InvalidValue: shapes, dtypes or layouts that do not fit together.
    """
    check_attention(q, k_cache, v_cache, block_tables, query_start, seq_lens, scale, window, out, lse)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    query_lens = query_start.diff().tolist() if query_lens is None else query_lens
    context_lens = seq_lens.tolist() if context_lens is None else context_lens
    block_size = k_cache.shape[1]
    row = 0
    for block_table, num_queries, length in zip(block_tables, query_lens, context_lens, strict=True):
        position = torch.arange(length, device=q.device)  # [S]
        block = block_table[position // block_size]  # [S]
        k = k_cache[block, position % block_size]  # [S, Hkv, D]
        v = v_cache[block, position % block_size]  # [S, Hkv, D]
        rows = slice(row, row + num_queries)
        out[rows] = attend(q[rows], k, v, scale, window)  # [Tq, Hq, D]
        if lse is not None:
            lse[rows] = log_sum_exp(q[rows], k, scale, window)  # [Tq, Hq]
        row += num_queries
    return out


def log_sum_exp(q: torch.Tensor, k: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    """Logarithm of the sum of e ** score over all that each query sees; arguments as of `attend`.

    Returns:
        `[Tq, Hq]` float32, or float64 for float64.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # [S, Hq, D]
    scores = torch.einsum("qhd,shd->qhs", q.to(wide), k.to(wide)) * scale  # [Tq, Hq, S]
    position = torch.arange(len(k), device=q.device)  # [S]
    own = position[len(k) - len(q) :, None]  # [Tq, 1]
    seen = position <= own  # [Tq, S]
    if window is not None:
        seen &= position > own - window
    return scores.masked_fill(~seen[:, None], float("-inf")).logsumexp(dim=-1)  # [Tq, Hq]
