"""Attention of a prompt, or a long chunk of one, on CPUs with 512-bit vectors: read `attend_unit` first.

Here arithmetic takes the time.  A *unit* is some query tokens with the heads that share a KV head; those heads of
those tokens are the rows of a small matrix.  It goes along its context key block by key block, so that scores
never leave the processor's caches (Dao et al., "FlashAttention", 2022):

    scores = Q K              rows x BLOCK
    weights                   2 ** (scores - the largest so far), in the type of V; and their sums
    sums = sums + weights V   rows x D

Both products are made in tiles whose sums stay in registers, see `cpu_tiles.py`; for them K and V are laid out anew,
once per call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from numba import njit, prange

from common.attention import attend
from common.compiled import LANES, LIKE, LINE, WORD, array_at, fingerprint, share_threads
from common.model.tiled_linear import instructions
from stage3_paged.kernels import cpu_numba, cpu_tiles, cpu_vectors
from stage3_paged.kernels.cpu_blocks import copy_blocks
from stage3_paged.kernels.cpu_numba import largest, power
from stage3_paged.kernels.cpu_tiles import lay_out, numbers, tile
from stage3_paged.kernels.cpu_vectors import itemsize, narrow
from stage3_paged.kernels.reference import log_sum_exp

BLOCK = 256  # positions of a key block
HIGH, WIDE = 6, 4  # rows and vectors of a tile: 24 sums, which leave registers for operands
ROWS = 48  # of a unit, about: with them scores and weights stay in the second-level cache
HIGHS, WIDES = (0,) * HIGH, (0,) * WIDE  # a tile's shape as types: compiled code knows it by their lengths

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""To copy numbers only their bits matter, and numba knows no bfloat16."""

CODE = fingerprint(cpu_numba, cpu_tiles, cpu_vectors)
"""Of what is compiled into `attend_units` from other files."""


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
    """Attend for each of some sequences: in tiles, or where the processor cannot, by torch.

    Args:
        q: `[T, Hq, D]`; the rows of a token in one piece, tokens may lie apart.
        keys: `[N, Hkv, D, bs]`.
        values: `[N, Hkv, bs, D]`.
        batch: (block table, first row, number of queries, context length) of each sequence.
        scale: factor on the scores.
        window: sliding window.
        out: `[T, Hq, D]`, contiguous; only rows of these sequences are written.
        lse: `[T, Hq]` or None; likewise, by the oracle: only tests ask for it here.
    """
    in_tiles = scale > 0 and can_attend(q.dtype, *values.shape[:1:-1])
    for table, row, num_queries, length in batch:
        rows = slice(row, row + num_queries)
        if in_tiles:
            attend_prompt(q[rows], keys, values, table, length, scale, window, out[rows])
        if not in_tiles or lse is not None:
            first = 0 if window is None else max(0, length - num_queries - window + 1)
            k, v = copy_to_one_piece(keys, values, table, first, length)  # each [S - first, Hkv, D]
        if not in_tiles:
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


def can_attend(dtype: torch.dtype, head_size: int, block_size: int) -> bool:
    """Whether tiles are best here: the processor has the vectors for them and, as for linear layers, nothing better.

    Heads are to be made of whole vectors, and blocks of whole words.
    """
    whole = head_size % LANES == 0 and block_size * dtype.itemsize % WORD == 0
    return whole and dtype in instructions()


def attend_prompt(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    length: int,
    scale: float,
    window: int | None,
    out: torch.Tensor,
) -> None:
    """Attend with the last `Tq` positions of one sequence; see `can_attend` for which.

    Args:
        q: `[Tq, Hq, D]`; the rows of a token in one piece, tokens may lie apart.
        keys: `[N, Hkv, D, bs]`, contiguous.
        values: `[N, Hkv, bs, D]`, contiguous.
        block_table: `[max blocks]` int32, contiguous, its blocks within the cache.
        length: S.
        scale: factor on the scores, above 0.
        window: sliding window.
        out: `[Tq, Hq, D]`, contiguous; written.
    """
    num_tokens, num_heads, head_size = q.shape
    num_kv_heads, block_size = values.shape[1:3]
    first = 0 if window is None else max(0, length - num_tokens - window + 1)
    first -= first % block_size  # of the positions that anybody sees, at the beginning of its block
    span = -(-(length - first) // BLOCK) * BLOCK
    lines = torch.empty(2 * num_kv_heads * span * head_size * q.itemsize + LINE, dtype=torch.uint8)
    attend_units(
        LIKE[q.dtype],
        np.uint16(0) if q.dtype == torch.bfloat16 else np.uint32(0),
        (0,) * min(LANES, block_size),
        (0,) * math.gcd(head_size // LANES, WIDE),
        *(q.data_ptr(), q.stride(0) * q.itemsize, out.data_ptr()),
        *(keys.data_ptr(), values.data_ptr(), block_table.data_ptr()),
        -(-lines.data_ptr() // LINE) * LINE,
        (num_tokens, num_heads, num_kv_heads, head_size, block_size),
        (first, length, span),
        np.float32(scale * math.log2(math.e)),
        window or length,
        share_threads(),
    )


@njit(cache=True, parallel=True)
def attend_units(  # noqa: PLR0913, PLR0917
    like,
    bits,
    lanes,
    value_wide,
    q_at,
    q_row,
    out_at,
    keys_at,
    values_at,
    table_at,
    lines_at,
    sizes,
    context,
    scale,
    window,
    workers,
    code=CODE,
):
    """Lay K and V out, then do all units; arguments as of `attend_prompt`, arrays as addresses."""
    num_tokens, num_heads, num_kv_heads, head_size, block_size = sizes
    first, length, span = context
    table = array_at(table_at, ((length - 1) // block_size + 1,), np.int32(0))
    head_bytes = span * head_size * itemsize(like)
    v_lines = lines_at + num_kv_heads * head_bytes
    for j in prange((span + block_size - 1) // block_size):
        place = first // block_size + j
        block = np.int64(table[place]) if place < len(table) else np.int64(-1)
        shape = num_kv_heads, head_size, block_size, span
        lay_out(
            bits, lanes, keys_at, values_at, block, lines_at, v_lines, j * block_size, length - first, shape
        )
    group = num_heads // num_kv_heads
    tokens = max(1, ROWS // group)  # of a unit
    tall = (tokens * group + HIGH - 1) // HIGH * HIGH
    units = (num_tokens + tokens - 1) // tokens * num_kv_heads
    for worker in prange(workers):
        query, weights = numbers(tall * head_size, like), numbers(tall * BLOCK, like)
        scores, sums = np.empty(tall * BLOCK, np.float32), np.empty(tall * head_size, np.float32)
        peaks, totals = np.empty(tall, np.float32), np.empty(tall, np.float32)
        for unit in range(worker, units, workers):
            head, t = unit % num_kv_heads, unit // num_kv_heads * tokens
            count = min(tokens, num_tokens - t)
            q_head = q_at + t * q_row + head * group * head_size * itemsize(like)
            load_rows(like, q_head, q_row, count, group * head_size, query)
            at = lines_at + head * head_bytes, v_lines + head * head_bytes
            unit_sizes = count * group, group, head_size, length - num_tokens + t - first, span
            attend_unit(like, value_wide, unit_sizes, at, scale, window, query,
                        (scores, weights, sums, peaks, totals))  # fmt: skip
            out_head = out_at + (t * num_heads + head * group) * head_size * itemsize(like)
            store_rows(
                like, out_head, num_heads * head_size, group * head_size, head_size, count, sums, totals
            )


@njit
def attend_unit(like, value_wide, sizes, at, scale, window, query, rooms):
    """Attend with the rows of `query`, flat `[rows, D]`; their `sums`, flat `[rows, D]`, and `totals` are written.

    Rows are made up to whole tiles: what comes of the others is never read.
    """
    rows, group, head_size, position, span = sizes
    scores, weights, sums, peaks, totals = rooms
    each, tall = itemsize(like), (rows + HIGH - 1) // HIGH * HIGH
    sums[:] = 0
    peaks[:] = -np.inf
    totals[:] = 0
    end = position + (rows - 1) // group + 1
    for start in range(max(0, position - window + 1) // BLOCK * BLOCK, end, BLOCK):
        step = WIDE * LANES
        width = min(BLOCK, (end - start + step - 1) // step * step)
        k_at, v_at = at[0] + start * head_size * each, at[1] + start * LANES * each
        for i in range(0, tall, HIGH):
            for p in range(0, width, step):
                tile(like, HIGHS, WIDES, False, k_at + p * head_size * each, LANES * head_size * each,
                     head_size * each // WORD, query.ctypes.data + i * head_size * each, head_size * each,
                     scores.ctypes.data + (i * BLOCK + p) * 4, BLOCK * 4)  # fmt: skip
        for r in range(rows):
            own = position + r // group  # sees itself and `window - 1` positions before
            near, far = max(0, own - window + 1 - start), min(width, own + 1 - start)
            row, weight = scores[r * BLOCK :][:width], weights[r * BLOCK :][:width]
            shrink = weigh(like, row, weight, near, far, scale, r, peaks, totals)
            if shrink != 1:
                sums[r * head_size : (r + 1) * head_size] *= shrink
        for i in range(0, tall, HIGH):
            for d in range(0, head_size, len(value_wide) * LANES):
                tile(like, HIGHS, value_wide, True, v_at + d * span * each, span * LANES * each,
                     width * each // WORD, weights.ctypes.data + i * BLOCK * each, BLOCK * each,
                     sums.ctypes.data + (i * head_size + d) * 4, head_size * 4)  # fmt: skip


@njit(fastmath={"reassoc", "contract"})
def weigh(like, row, weight, near, far, scale, r, peaks, totals):
    """Turn scores near ... far - 1 of row r into weights, all others into 0; return what earlier sums are worth now."""
    weight[:] = 0
    if near >= far:
        return np.float32(1)
    peak = max(peaks[r], largest(row[near:far]) * scale)
    shrink = power(peaks[r] - peak)
    total = np.float32(0)
    seen, own = row[near:far], weight[near:far]
    for i in range(len(seen)):
        x = power(seen[i] * scale - peak)
        own[i] = narrow(x, like)
        total += x
    peaks[r], totals[r] = peak, totals[r] * shrink + total
    return shrink


@njit
def load_rows(like, q_at, q_row, count, width, query):
    """Copy one head's rows of some tokens, `width` numbers of each, to `query`."""
    for t in range(count):
        query[t * width : (t + 1) * width] = array_at(q_at + t * q_row, (width,), like)


@njit
def store_rows(like, out_at, out_width, width, head_size, count, sums, totals):
    """Divide the rows' sums by their totals and write them, `width` numbers of each token."""
    out = array_at(out_at, ((count - 1) * out_width + width,), like)
    for i in range(count * width // head_size):
        row, begin = sums[i * head_size :][:head_size], i * head_size
        first = begin // width * out_width + begin % width
        share = np.float32(1) / totals[i]
        for d in range(head_size):
            out[first + d] = narrow(row[d] * share, like)
