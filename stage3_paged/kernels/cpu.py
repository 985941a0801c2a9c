"""Paged attention at CPU speed: the algorithm of `triton.py`, compiled by numba for all cores.

Decodes and short chunks go through `cpu_numba.attend_short`, in one launch for the whole batch: it reads
each K and V once, where they lie, at the speed of memory.  A long chunk or a prompt is bound by arithmetic
instead: there each block is read by hundreds of tokens, so its blocks are copied to one piece first (a few
percent of the time) and torch's own attention does the rest.

Layout: the caches are seen as `[N, bs, Hkv, D]` like those of `reference.py`, but the tokens of a block lie
innermost in K, `[N, Hkv, D, bs]`, and V is `[N, Hkv, bs, D]`.  So both products of attention add up whole
vectors: q[d] * K[d, 16 tokens], then weight[t] * V[t, 16 dimensions], without a sum across a vector.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from functools import cache

import numpy as np
import torch
from numba.core import event

from common.attention import attend
from common.compiled import LIKE, share_threads
from common.errors import InvalidValue
from stage3_paged.kernels.checks import check_attention, check_block_size, check_store
from stage3_paged.kernels.cpu_blocks import copy_blocks, store_few, store_many
from stage3_paged.kernels.cpu_numba import attend_short
from stage3_paged.kernels.cpu_vectors import AHEAD
from stage3_paged.kernels.reference import log_sum_exp

LONGEST_SHORT_QUERY = 16
"""Up to here a query's tokens go one by one through the decode kernel; measured, it is even at about 20."""

BASE = math.log2(math.e)
"""e ** x is 2 ** (BASE * x): float32 scores are scaled by it, as `cpu_numba.power` raises 2."""

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""To copy numbers only their bits matter, and numba knows no bfloat16."""

FEW_TOKENS = 64
"""Up to here one thread stores faster than all of them start."""


def make_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one layer, seen as `[N, bs, Hkv, D]`; what a slot holds before its first write is undefined."""
    check_block_size(block_size)
    k = torch.empty((num_blocks, num_kv_heads, head_size, block_size), dtype=dtype, device=device)
    v = torch.empty((num_blocks, num_kv_heads, block_size, head_size), dtype=dtype, device=device)
    return k.permute(0, 3, 1, 2), v.permute(0, 2, 1, 3)  # both [N, bs, Hkv, D]


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write K and V of T tokens to their slots; see `reference.store_kv`.

    Raises:
        InvalidValue: arguments that do not fit together, or a slot outside the cache.
    """
    check_store(k, v, v_cache, v_cache, slot_mapping)
    _check_layout(k_cache, v_cache)
    k, v, slots = _whole_rows(k), _whole_rows(v), slot_mapping.contiguous()
    store = store_few
    if len(k) > FEW_TOKENS:
        share_threads()
        store = store_many
    wrong = store(
        LIKE[k.dtype],
        slots.data_ptr(),
        len(k),
        *(array.data_ptr() for array in (k, v, k_cache, v_cache)),
        k.stride(0) * k.itemsize,
        v.stride(0) * v.itemsize,
        tuple(v_cache.shape),
    )
    if wrong >= 0:
        num_slots = v_cache.shape[0] * v_cache.shape[1]
        raise InvalidValue("slot_mapping", int(slots[wrong]), f"0 to {num_slots - 1}")


def gather(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Read slots `[n]` of one of the caches back: `[n, Hkv, D]`."""
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
    """Attend with the last positions of each sequence, `[T, Hq, D]`; arguments as of `reference.py`.

    Raises:
        InvalidValue: arguments that do not fit together, or a block outside the cache.
    """
    check_attention(q, v_cache, v_cache, block_tables, query_start, seq_lens, window, out, lse)
    _check_layout(k_cache, v_cache)
    out = torch.empty(q.shape, dtype=q.dtype) if out is None else out
    query_lens = query_start.diff().tolist() if query_lens is None else query_lens
    context_lens = seq_lens.tolist() if context_lens is None else context_lens
    if sum(query_lens) != len(q):
        raise InvalidValue("query_lens", sum(query_lens), f"{len(q)} in all, one per row of q")
    batch = block_tables, query_start, seq_lens
    bad = attend_short_queries(q, k_cache, v_cache, batch, scale, window, out, lse)
    if bad >= 0:
        allowed = f"0 to {len(v_cache) - 1} for {context_lens[bad]} tokens"
        raise InvalidValue(f"block_tables[{bad}]", block_tables[bad].tolist(), allowed)
    if max(query_lens, default=0) > LONGEST_SHORT_QUERY:
        rows = zip(block_tables, query_start[:-1].tolist(), query_lens, context_lens, strict=True)
        keys, values = k_cache.permute(0, 2, 3, 1), v_cache.permute(0, 2, 1, 3)  # as they lie in memory
        attend_long_queries(q, keys, values, rows, scale, window, out, lse)
    return out


def attend_short_queries(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float,
    window: int | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> int:
    """Run the decode kernel for all sequences of at most LONGEST_SHORT_QUERY queries.

    Args:
        q: `[T, Hq, D]`.
        k_cache: `[N, bs, Hkv, D]`, laid out by `make_cache`.
        v_cache: `[N, bs, Hkv, D]`.
        batch: block tables, query_start and seq_lens.
        scale: factor on the scores.
        window: sliding window.
        out: `[T, Hq, D]`; rows of longer queries are left undefined.
        lse: `[T, Hq]` or None; likewise.

    Returns:
        -1, or the first sequence of the whole batch with a block outside the cache; then nothing was read.
    """
    exact = q.dtype == torch.float64
    num_heads, head_size = q.shape[1:]
    block_size, num_kv_heads = v_cache.shape[1:3]
    q = _whole_rows(q)
    block_tables, query_start, seq_lens = (array.contiguous() for array in batch)
    result = out if out.is_contiguous() else torch.empty(q.shape, dtype=q.dtype)  # [T, Hq, D]
    bad = attend_short(
        *tile_shape(num_heads // num_kv_heads, block_size, head_size, lanes=8 if exact else 16),
        LIKE[q.dtype],
        q.data_ptr(),
        q.stride(0) * q.itemsize,
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        block_tables.data_ptr(),
        query_start.data_ptr(),
        seq_lens.data_ptr(),
        result.data_ptr(),
        0 if lse is None else lse.data_ptr(),
        *block_tables.shape,
        *v_cache.shape,
        num_heads,
        v_cache.stride(0) * v_cache.itemsize,
        1.0 if exact else np.float32(1 / BASE),
        scale if exact else np.float32(scale * BASE),
        window or 0,
        LONGEST_SHORT_QUERY,
        share_threads(),
    )
    if result is not out and bad < 0:
        out.copy_(result)
    return bad


@cache
def tile_shape(group: int, block_size: int, head_size: int, lanes: int) -> tuple[tuple[int, ...], ...]:
    """Tuples as long as tiles are high, as blocks lie side by side, as the logarithms of tiles' two widths.

    High: query heads of one KV head, so that each K and V is loaded once for all of them, up to 8.  Side by
    side: as many blocks as leave some registers free.  Wide: the numbers of one vector; values take as many
    vectors as scores take blocks, to read whole cache lines.
    """
    rows = max(r for r in range(1, 9) if group % r == 0)
    vectors = min(AHEAD, 1 << (16 // rows).bit_length() - 1)
    widths = (math.gcd(lanes, block_size), math.gcd(lanes * vectors, head_size))  # powers of two
    return (0,) * rows, (0,) * vectors, *((0,) * (width.bit_length() - 1) for width in widths)


def attend_long_queries(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: Iterable[tuple[torch.Tensor, int, int, int]],
    scale: float,
    window: int | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Run torch's attention for each sequence of more than LONGEST_SHORT_QUERY queries.

    Args:
        q: `[T, Hq, D]`.
        keys: `[N, Hkv, D, bs]`.
        values: `[N, Hkv, bs, D]`.
        batch: (block table, first row, number of queries, context length) of each sequence.
        scale: factor on the scores.
        window: sliding window.
        out: `[T, Hq, D]`; only rows of these sequences are written.
        lse: `[T, Hq]` or None; likewise, by the oracle: only tests ask for it here.
    """
    for table, row, num_queries, length in batch:
        if num_queries > LONGEST_SHORT_QUERY:
            first = 0 if window is None else max(0, length - num_queries - window + 1)
            k, v = copy_to_one_piece(keys, values, table, first, length)  # each [S - first, Hkv, D]
            rows = slice(row, row + num_queries)
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


def _check_layout(k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Refuse caches that are not as `make_cache` makes them: they go as addresses from here on."""
    found = k_cache.dtype, k_cache.shape, k_cache.stride(), v_cache.stride()
    if found != _layout(v_cache.dtype, v_cache.shape):
        raise InvalidValue("k_cache", found[:3], f"what make_cache returns beside {v_cache.dtype} V")


@cache
def _layout(dtype: torch.dtype, shape: torch.Size) -> tuple[object, ...]:
    """Dtype, shape and strides of K and strides of V as `make_cache` lays them; the same for each layer."""
    num_blocks, block_size, num_kv_heads, head_size = shape
    k, v = make_cache(num_blocks, block_size, num_kv_heads, head_size, dtype, "meta")
    return k.dtype, k.shape, k.stride(), v.stride()


def _whole_rows(x: torch.Tensor) -> torch.Tensor:
    """`[T, H, D]` with each row in one piece; the rows may lie anywhere, as in a fused projection."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


class _Announcement(event.Listener):
    """Say once that code is being compiled, so that a first call of some seconds is no riddle."""

    def __init__(self) -> None:
        self.said = False

    def on_start(self, event: event.Event) -> None:
        """A compilation begins; nothing is said if the code was found in the cache on disk."""
        ours = event.data["dispatcher"].py_func.__module__.startswith(__name__)
        if ours and not self.said:
            self.said = True
            print("compiling the CPU attention kernel (once, then cached) ...", file=sys.stderr, flush=True)

    def on_end(self, event: event.Event) -> None:
        """Nothing to say."""


event.register("numba:compile", _Announcement())
