"""Paged attention on the GPU: this file checks, chooses a launch and starts `triton_device.py`'s programs.

Nothing here waits for the GPU as long as the caller passes `query_lens`, and nothing depends on values that
live on the GPU, so that a decode step can be captured as a CUDA graph and replayed with new contents.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton

from common.errors import InvalidValue
from stage3_paged.kernels.checks import check_attention, check_store
from stage3_paged.kernels.reference import gather, make_cache
from stage3_paged.kernels.triton_device import (
    merge_splits_kernel,
    paged_attention_simple_kernel,
    paged_attention_tile_kernel,
    store_kv_kernel,
)

__all__ = ["gather", "make_cache", "paged_attention", "paged_attention_simple", "store_kv"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, on the CPU: TRITON_INTERPRET=1 when triton was imported."""

LOG2_E = math.log2(math.e)
"""Folded into the scale, since the GPU has exp2 and makes exp of it."""

MIN_DOT = 16
"""`tl.dot` takes no side shorter than this."""

FULL_GPU = 256
"""Programs that keep a large GPU busy (about two per multiprocessor); with fewer, contexts are split."""

MIN_SPLIT = 256
"""Shortest part of a context worth a program of its own, in positions."""

MAX_SPLITS = 32


@dataclass(frozen=True)
class Launch:
    """Shape of a program of the tile kernel."""

    rows: int  # query tokens x heads of the group
    keys: int  # positions read at a time
    num_warps: int
    num_stages: int  # steps of the loop whose loads are in flight together


LAUNCHES = {
    # (more rows than the small tile has, padded head size) for float16 and bfloat16
    (False, 64): Launch(16, 64, 4, 5),
    (False, 128): Launch(16, 64, 4, 5),
    (False, 256): Launch(16, 32, 4, 5),
    (True, 64): Launch(128, 64, 8, 5),
    (True, 128): Launch(128, 64, 8, 3),
    (True, 256): Launch(64, 32, 8, 5),
}
"""Largest tiles that keep everything in registers on all three targets (tests/kernels compiles them all).

Two loads in the loop depend on each other, the block number and then its K/V; the compiler divides the stages
between them, so five stages keep two tiles of K and V in flight.
"""

FLOAT32_LAUNCH = Launch(16, 16, 4, 2)
"""Full float32 products run outside the matrix units: right to check with, slow, and short of registers."""

ON_AMD = torch.version.hip is not None
AMD_STAGES = 2  # more than two tiles of K and V do not fit into the 64 KiB of shared memory


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write K and V of T tokens to their slots; arguments and errors as in `reference.store_kv`.

    A negative slot stores nothing, for the rows that fill up the batch of a captured graph.
    """
    check_store(k, v, k_cache, v_cache, slot_mapping)
    check_dtype(k_cache.dtype)
    num_tokens, num_heads, head_size = k.shape
    if num_tokens == 0:
        return
    store_kv_kernel[(num_tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        *k.stride()[:2],
        *v.stride()[:2],
        *k_cache.stride()[:3],
        NUM_HEADS=num_heads,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=k_cache.shape[1],
        HP=triton.next_power_of_2(num_heads),
        DP=triton.next_power_of_2(head_size),
    )


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
    num_splits: int | None = None,
) -> torch.Tensor:
    """Attend with each sequence's last positions; arguments and errors as in `reference.paged_attention`.

    `context_lens` is not needed.  Without `query_lens` the longest query is asked from the GPU, which waits.
    `num_splits` (a power of two) overrides the choice of how many programs share one context.
    """
    check_attention(q, k_cache, v_cache, block_tables, query_start, seq_lens, scale, window, out, lse)
    check_dtype(q.dtype)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out  # [T, Hq, D]
    if len(q) == 0:
        return out
    num_kv_heads, num_seqs = k_cache.shape[2], len(seq_lens)
    group = q.shape[1] // num_kv_heads
    longest = longest_query(query_start, query_lens)
    launch = choose_launch(longest * group, group, q.shape[2], q.dtype)
    tiles = triton.cdiv(longest, launch.rows // group)
    if num_splits is None:
        num_splits = choose_splits(tiles * num_kv_heads * num_seqs, block_tables.shape[1] * k_cache.shape[1])
    grid = (tiles * num_splits, num_kv_heads, num_seqs)
    batch = (q, k_cache, v_cache, block_tables, query_start, seq_lens)
    if num_splits == 1:
        start_tiles(grid, launch, 1, out[None], lse, *batch, scale, window)
        return out
    shape = (num_splits, *q.shape[:2])
    partial = torch.empty((*shape, q.shape[2]), dtype=torch.float32, device=q.device)  # [splits, T, Hq, D]
    partial_lse = torch.empty(shape, dtype=torch.float32, device=q.device)  # [splits, T, Hq]
    start_tiles(grid, launch, num_splits, partial, partial_lse, *batch, scale, window)
    merge_splits_kernel[q.shape[:2]](
        out,
        lse,
        partial,
        partial_lse,
        *out.stride()[:2],
        HEAD_SIZE=q.shape[2],
        SPLITS=num_splits,
        DP=padded(q.shape[2]),
    )
    return out


def start_tiles(  # noqa: PLR0913, PLR0917
    grid: tuple[int, int, int],
    launch: Launch,
    num_splits: int,
    target: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int | None,
) -> None:
    """Start the tile kernel; each split goes to `target` `[splits, T, Hq, D]` and `lse` `[splits, T, Hq]`."""
    paged_attention_tile_kernel[grid](
        target,
        lse,
        q,
        k_cache,
        v_cache,
        block_tables,
        query_start,
        seq_lens,
        scale * LOG2_E,
        q.shape[0],
        *target.stride()[:3],
        *q.stride()[:2],
        *k_cache.stride()[:3],
        block_tables.stride(0),
        G=q.shape[1] // k_cache.shape[2],
        HEAD_SIZE=q.shape[2],
        BLOCK_SIZE=k_cache.shape[1],
        WINDOW=window or 0,
        SPLITS=num_splits,
        ROWS=launch.rows,
        KEYS=launch.keys,
        DP=padded(q.shape[2]),
        UPCAST=INTERPRETED and q.dtype == torch.bfloat16,  # the interpreter cannot multiply bfloat16
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def paged_attention_simple(  # noqa: PLR0913, PLR0917
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
) -> torch.Tensor:
    """The same by the simplest kernel, one program per query token and head: to read, not to serve with."""
    check_attention(q, k_cache, v_cache, block_tables, query_start, seq_lens, scale, window, out)
    check_dtype(q.dtype)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out  # [T, Hq, D]
    if len(q) == 0:
        return out
    paged_attention_simple_kernel[longest_query(query_start, query_lens), len(seq_lens), q.shape[1]](
        out,
        q,
        k_cache,
        v_cache,
        block_tables,
        query_start,
        seq_lens,
        scale * LOG2_E,
        *out.stride()[:2],
        *q.stride()[:2],
        *k_cache.stride()[:3],
        block_tables.stride(0),
        G=q.shape[1] // k_cache.shape[2],
        HEAD_SIZE=q.shape[2],
        BLOCK_SIZE=k_cache.shape[1],
        WINDOW=window or 0,
        DP=padded(q.shape[2]),
    )
    return out


def longest_query(query_start: torch.Tensor, query_lens: list[int] | None) -> int:
    """Tokens of the longest query: from the host's copy, or else by waiting for the GPU's."""
    return int(query_start.diff().max()) if query_lens is None else max(query_lens)


def choose_launch(num_rows: int, group: int, head_size: int, dtype: torch.dtype) -> Launch:
    """The table's entry for the longest query of a batch (`num_rows` = its tokens x the heads of a group)."""
    lanes = max(padded(head_size), 64)
    launch = LAUNCHES[False, lanes]
    if dtype == torch.float32:
        launch = FLOAT32_LAUNCH
    elif num_rows > launch.rows:
        launch = LAUNCHES[True, lanes]
    return replace(
        launch,
        rows=max(launch.rows, triton.next_power_of_2(group)),  # a tile holds all heads of a group
        num_stages=AMD_STAGES if ON_AMD else launch.num_stages,
    )


def choose_splits(num_programs: int, max_context: int) -> int:
    """Into how many parts to cut each context: a power of two, so that even one long sequence fills the GPU.

    `max_context` is the width of the block tables, not a length that changes from step to step: a captured
    graph keeps its grid.  A part that turns out empty costs a program that returns at once.
    """
    splits = 1
    while splits < MAX_SPLITS and num_programs * splits < FULL_GPU and max_context >= 2 * splits * MIN_SPLIT:
        splits *= 2
    return splits


def padded(head_size: int) -> int:
    """Lanes of a tile: a power of two that `tl.dot` takes.

    Raises:
        InvalidValue: more than 256, for which the launch table has no entry.
    """
    if head_size > 256:
        raise InvalidValue("head_size", head_size, "at most 256")
    return max(MIN_DOT, triton.next_power_of_2(head_size))


def check_dtype(dtype: torch.dtype) -> None:
    """Refuse what the matrix units cannot multiply."""
    if dtype not in DTYPES:
        raise InvalidValue("dtype", dtype, "float16, bfloat16 or float32 for the Triton kernel")
