"""Paged attention at CPU speed: the algorithm of `triton.py`, compiled by numba for all cores.

Decodes and short chunks go through `cpu_numba.attend_short`, in one launch for the whole batch: it reads
each K and V once, where they lie, at the speed of memory.  A long chunk or a prompt is bound by arithmetic
instead: there each block is read for hundreds of rows, and `cpu_prompt.attend_long_queries` multiplies whole tiles.

How K and V lie in memory for it is in `cpu_layout.py`.
"""

from __future__ import annotations

import math
import sys
from functools import cache, lru_cache
from operator import sub
from typing import Any

import numpy as np
import torch
from numba.core import event

from common.compiled import LIKE, launch, share_threads
from common.errors import InvalidValue
from stage3_paged.kernels.checks import Layout, check_attention_layouts, check_store_layouts
from stage3_paged.kernels.cpu_blocks import store_few, store_many
from stage3_paged.kernels.cpu_layout import check_cache_layout, gather, make_cache, word_of
from stage3_paged.kernels.cpu_numba import attend_short
from stage3_paged.kernels.cpu_prompt import attend_long_queries
from stage3_paged.kernels.cpu_vectors import AHEAD

__all__ = ["gather", "make_cache", "paged_attention", "store_kv"]

LONGEST_SHORT_QUERY = 16
"""Up to here a query's tokens go one by one through the decode kernel; measured, it is even at about 20."""

BASE = math.log2(math.e)
"""e ** x is 2 ** (BASE * x): float32 scores are scaled by it, as `cpu_numba.power` raises 2."""

FEW_TOKENS = 16
"""Up to here one thread stores faster than all of them start."""

REMEMBERED = 1024
"""Kinds of calls, by the layouts of their arguments, that need not be looked at again."""


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
    plan = _plan_store(*map(Layout.of, (k, v, k_cache, v_cache, slot_mapping)))
    if plan is None:
        return store_kv(k.contiguous(), v.contiguous(), k_cache, v_cache, slot_mapping.contiguous())
    store, *about, sizes = plan
    if store is store_many:
        share_threads()
    addresses = (array.data_ptr() for array in (slot_mapping, k, v, k_cache, v_cache))
    wrong = launch(store, *about, *addresses, *sizes)
    if wrong >= 0:
        num_slots = v_cache.shape[0] * v_cache.shape[1]
        raise InvalidValue("slot_mapping", int(slot_mapping[wrong]), f"0 to {num_slots - 1}")
    return None


@lru_cache(maxsize=REMEMBERED)
def _plan_store(
    k: Layout, v: Layout, k_cache: Layout, v_cache: Layout, slot_mapping: Layout
) -> tuple[Any, ...] | None:
    """Check a call of `store_kv`; remembered as `_plan_attention` is.

    Returns:
        What stores, what it is told before addresses and what behind; None if arrays are to be copied first.
    """
    check_store_layouts(k, v, v_cache, v_cache, slot_mapping)
    check_cache_layout(k_cache, v_cache)
    if not (_whole_rows(k) and _whole_rows(v) and _packed(slot_mapping)):
        return None
    rows = (x.stride[0] * x.dtype.itemsize for x in (k, v))
    store = store_few if k.shape[0] <= FEW_TOKENS else store_many
    return store, LIKE[k.dtype], word_of(v_cache), k.shape[0], (tuple(rows), tuple(v_cache.shape))


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
    arrays = q, k_cache, v_cache, block_tables, query_start, seq_lens
    optional = (None if array is None else Layout.of(array) for array in (out, lse))
    plan = _plan_attention(*map(Layout.of, arrays), *optional, scale, window)
    if plan is None:  # once more, with arrays as compiled code takes them
        q, block_tables = q.contiguous(), block_tables.contiguous()
        batch = block_tables, query_start, seq_lens
        result = paged_attention(
            q, k_cache, v_cache, *batch, scale, window, None, query_lens, context_lens, lse
        )
        return result if out is None else out.copy_(result)
    query_lens = query_start.diff().tolist() if query_lens is None else query_lens
    if sum(query_lens) != q.shape[0]:
        raise InvalidValue("query_lens", sum(query_lens), f"{q.shape[0]} in all, one per row of q")
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    addresses = (array.data_ptr() for array in (*arrays, out))
    lse_at = 0 if lse is None else lse.data_ptr()
    bad = launch(attend_short, *plan, *addresses, lse_at, share_threads())
    if bad >= 0:
        allowed = f"0 to {len(v_cache) - 1} for {int(seq_lens[bad])} tokens"
        raise InvalidValue(f"block_tables[{bad}]", block_tables[bad].tolist(), allowed)
    if max(query_lens, default=0) > LONGEST_SHORT_QUERY:
        # By the lengths that `attend_short` has looked at: host copies could be wrong.
        start, lengths = query_start.tolist(), seq_lens.tolist()
        rows = zip(block_tables, start, map(sub, start[1:], start), lengths, strict=False)
        longer = [row for row in rows if row[2] > LONGEST_SHORT_QUERY]
        if not longer:
            return out
        keys, values = k_cache.permute(0, 2, 3, 1), v_cache.permute(0, 2, 1, 3)  # as they lie in memory
        attend_long_queries(q, keys, values, longer, scale, window, out, lse)
    return out


@lru_cache(maxsize=REMEMBERED)
def _plan_attention(
    q: Layout,
    k_cache: Layout,
    v_cache: Layout,
    block_tables: Layout,
    query_start: Layout,
    seq_lens: Layout,
    out: Layout | None,
    lse: Layout | None,
    scale: float,
    window: int | None,
) -> tuple[object, ...] | None:
    """Check a call of `paged_attention` and find all that `attend_short` is told beside addresses.

    It depends on nothing but its arguments, so what is remembered never goes stale; and 30 layers of a decode
    step, and most decode steps, ask the same.

    Returns:
        The first arguments of `attend_short`; None if arrays are to be copied first.
    """
    check_attention_layouts(q, v_cache, v_cache, block_tables, query_start, seq_lens, out, lse, scale, window)
    check_cache_layout(k_cache, v_cache)
    if not (_whole_rows(q) and _packed(block_tables) and (out is None or _packed(out))):
        return None
    exact = q.dtype == torch.float64
    num_heads, head_size = q.shape[1:]
    block_size, num_kv_heads = v_cache.shape[1:3]
    return (
        *tile_shape(num_heads // num_kv_heads, block_size, head_size, lanes=8 if exact else 16),
        word_of(v_cache),
        LIKE[q.dtype],
        (*block_tables.shape, *v_cache.shape, num_heads),
        q.stride[0] * q.dtype.itemsize,
        1.0 if exact else np.float32(1 / BASE),
        scale if exact else np.float32(scale * BASE),
        window or 0,
        LONGEST_SHORT_QUERY,
    )


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


def _whole_rows(x: Layout) -> bool:
    """Whether each row of `[T, H, D]` is in one piece; rows may lie anywhere, as in a fused projection."""
    return _packed(x._replace(shape=x.shape[1:], stride=x.stride[1:]))


def _packed(x: Layout) -> bool:
    """Whether a tensor is in one piece."""
    return torch.empty_strided(x.shape, x.stride, device="meta").is_contiguous()


class _Announcement(event.Listener):
    """Say once that code is being compiled, so that a first call of some seconds is no riddle."""

    def __init__(self) -> None:
        self.said = False

    def on_start(self, event: event.Event) -> None:
        """A compilation begins; nothing is said if the code was found in the cache on disk."""
        ours = str(event.data["dispatcher"].py_func.__module__).startswith(__name__)
        if ours and not self.said:
            self.said = True
            print("compiling the CPU attention kernel (once, then cached) ...", file=sys.stderr, flush=True)

    def on_end(self, event: event.Event) -> None:
        """Nothing to say."""


event.register("numba:compile", _Announcement())
