"""The compiled half of `cpu_prompt.py`: read `attend_unit` first, it is the whole algorithm.

A *unit* is some of the rows that share a KV head: every query head of that KV head in every token of a sequence is
one row.  A unit goes along its context key block by key block, so that scores never leave the processor's caches
(Dao et al., "FlashAttention", 2022):

    scores = Q K              rows x BLOCK
    weights                   2 ** (scores - the largest so far), in the type of V; and their sums
    sums = sums + weights V   rows x D

Both products are made in tiles whose sums stay in registers, of K and V where they lie: see `cpu_lines.py`.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange

from common.compiled import LANES, array_at, compiled, narrow
from stage3_paged.kernels import cpu_lines, cpu_softmax, cpu_vectors
from stage3_paged.kernels.cpu_lines import list_strips, score_strips, weigh_strips
from stage3_paged.kernels.cpu_softmax import exponentiate, largest, power
from stage3_paged.kernels.cpu_vectors import copy_row, factors, itemsize

BLOCK = 512  # positions of a key block
HIGH, WIDE = 6, 4  # rows and vectors of a tile: 24 sums, which leave registers for operands
ROWS = 48  # of a unit, at most: with them scores and weights stay in the second-level cache
TALL = -(-ROWS // HIGH) * HIGH  # rows that there is room for
HIGHS, WIDES = (0,) * HIGH, (0,) * WIDE  # a tile's shape as types: compiled code knows it by their lengths

FIELDS, NUM_TOKENS = 6, 2
"""Of each sequence: address of its block table; its first row of q; query tokens; length of its context; first
position that anybody sees, or one before, where a block begins; address of the addresses of its strips, those of K and
then those of V."""


@compiled(cpu_lines, cpu_softmax, cpu_vectors, parallel=True)
def attend_units(  # noqa: PLR0913, PLR0917
    like,
    word,
    value_wide,
    q_at,
    q_row,
    out_at,
    lse_at,
    keys_at,
    values_at,
    batch_at,
    num_seqs,
    sizes,
    scale,
    unit,
    window,
    workers,
):
    """Find K and V of some sequences, then do all units of their queries.

    Args:
        like: a number of the type of q, see `common.compiled.LIKE`.
        word: tuple as long as numbers share a word of a line, see `cpu_layout.numbers_per_word`.
        value_wide: tuple as long as a tile of values has vectors; whole tiles make D.
        q_at: address of q, `[T, Hq, D]`.
        q_row: bytes from one token of q to the next.
        out_at: address of the result, `[T, Hq, D]`.
        lse_at: address of `[T, Hq]` for the logarithms of the sums of weights; or 0.
        keys_at: address of K, `[N, Hkv, D, bs]`.
        values_at: address of V, `[N, Hkv, bs, D]`.
        batch_at: address of `[num_seqs, FIELDS]` int64.
        num_seqs: sequences.
        sizes: tuple of Hq, Hkv, D, bs.
        scale: factor on the scores, which makes them ones for powers of 2.
        unit: what such a score is multiplied by for `lse`.
        window: sliding window, or more than any context.
        workers: number of threads.
    """
    num_heads, num_kv_heads, head_size, block_size = sizes
    group = num_heads // num_kv_heads
    batch = array_at(batch_at, (num_seqs, FIELDS), np.int64(0))
    units = list_units(batch, group, num_kv_heads)
    for s in prange(num_seqs):
        shape = num_kv_heads, head_size, block_size  # made here: numba hands threads no tuple of tuples
        table_at, _, _, length, first, strips_at = batch[s]
        table = array_at(table_at, ((length - 1) // block_size + 1,), np.int32(0))
        strips = array_at(strips_at, (2, (length - first + LANES - 1) // LANES), np.int64(0))
        list_strips(like, table, keys_at, values_at, first, length, shape, strips)
    for worker in prange(workers):
        query, weights = factors(TALL * head_size, like, word), factors(TALL * BLOCK, like, word)
        scores, sums = np.empty(TALL * BLOCK, np.float32), np.empty(TALL * head_size, np.float32)
        peaks, totals = np.empty(TALL, np.float32), np.empty(TALL, np.float32)
        spare = np.empty(head_size + LANES, np.uint32), np.empty(1, np.int64)
        for u in range(worker, len(units), workers):
            s, head, begin, end = units[u]
            _, token, num_tokens, length, first, strips_at = batch[s]
            place = token, num_heads, head, group, head_size
            load_rows(like, q_at, q_row, place, begin, end, query)
            rows = begin, end, group, head_size, length - num_tokens - first, length - first
            at = strips_at, head, block_size
            rooms = scores, weights, sums, peaks, totals, spare
            attend_unit(like, word, value_wide, rows, at, scale, window, query, rooms)
            store_rows(like, out_at, lse_at, place, begin, end, unit, (sums, peaks, totals))


@njit
def list_units(batch, group, num_kv_heads):
    """Cut the rows of all sequences into units of about the same size.

    Returns:
        `[U, 4]` int64: sequence, KV head, first row and the one behind the last, both counted from the sequence's.
    """
    parts = (batch[:, NUM_TOKENS] * group + ROWS - 1) // ROWS  # [num_seqs]
    units = np.empty((parts.sum() * num_kv_heads, 4), np.int64)
    count = 0
    for s in range(len(batch)):
        rows = batch[s, NUM_TOKENS] * group
        for part in range(parts[s]):
            for head in range(num_kv_heads):
                units[count] = s, head, rows * part // parts[s], rows * (part + 1) // parts[s]
                count += 1
    return units


@njit
def attend_unit(like, word, value_wide, sizes, at, scale, window, query, rooms):
    """Attend with the rows of `query`, flat `[rows, D]`; `sums`, flat `[rows, D]`, `peaks` and `totals` are written.

    Rows are made up to whole tiles: what comes of the others is never read.

    Args:
        like: a number of the type of q, K and V.
        word: see `attend_units`.
        value_wide: see there.
        sizes: first row and the one behind the last; rows per token; D; position of the sequence's first row, and
            positions that there are, both counted from its first strip.
        at: address of the strips' addresses, KV head, bs.
        scale: factor on the scores.
        window: see `attend_units`.
        query: see above.
        rooms: room for scores, weights, sums, largest scores, sums of weights, and what `weigh_strips` needs.
    """
    begin, last, group, head_size, position, length = sizes
    strips, head, block_size = at
    scores, weights, sums, peaks, totals, spare = rooms
    tall = (last - begin + HIGH - 1) // HIGH * HIGH
    each = itemsize(like)
    plane, vector = head * block_size * head_size * each, block_size * LANES * each
    v_strips = strips + (length + LANES - 1) // LANES * 8
    sums[:] = 0
    peaks[:] = -np.inf
    totals[:] = 0
    near, end = position + begin // group - window + 1, position + (last - 1) // group + 1
    for start in range(max(0, near) // BLOCK * BLOCK, end, BLOCK):
        count, strip = min(BLOCK, end - start), start // LANES
        score_strips(like, (HIGHS, WIDES), strips, strip, (count + LANES - 1) // LANES, plane, tall, head_size,
                     query.ctypes.data, scores.ctypes.data, BLOCK)  # fmt: skip
        for r in range(last - begin):
            own = position + (begin + r) // group - start  # sees itself and `window - 1` positions before
            row, weight = scores[r * BLOCK :][:BLOCK], weights[r * BLOCK :][:BLOCK]
            seen = max(0, own - window + 1), min(count, own + 1), count
            shrink = weigh(like, row, weight, seen, scale, r, peaks, totals)
            if shrink != 1:
                for d in range(r * head_size, (r + 1) * head_size):
                    sums[d] *= shrink
        weigh_strips(like, word, (HIGHS, WIDES, value_wide), v_strips, strip, count, (plane, vector), tall, head_size,
                     weights.ctypes.data, sums.ctypes.data, BLOCK, spare)  # fmt: skip


@njit
def weigh(like, row, weight, seen, scale, r, peaks, totals):
    """Turn the scores that row r sees of a key block into weights, all others into 0.

    Args:
        like: a number of the type of weights.
        row: scores.
        weight: written.
        seen: first position, the one behind the last, positions in the key block.
        scale: factor on the scores.
        r: the row.
        peaks: of each row the largest score so far; updated.
        totals: of each row the sum of weights so far; updated.

    Returns:
        What earlier sums are worth now.
    """
    near, far, count = seen
    far = max(near, far)
    peak = max(peaks[r], largest(row, near, far) * scale)
    total = exponentiate(row, near, far, scale, peak, weight, like)
    for i in range((far + LANES - 1) // LANES * LANES, (count + LANES - 1) // LANES * LANES):
        weight[i] = 0
    shrink = np.float32(1)
    if peak > peaks[r] > -np.inf:
        shrink = power(peaks[r] - peak)
    peaks[r], totals[r] = peak, totals[r] * shrink + total
    return shrink


@njit
def load_rows(like, q_at, q_row, place, begin, end, query):
    """Copy rows begin ... end - 1 of one KV head to `query`."""
    token, _, head, group, head_size = place
    size = head_size * itemsize(like)
    for r in range(begin, end):
        own = (head * group + r % group) * size  # where this head lies in its token
        copy_row(q_at + (token + r // group) * q_row + own, query.ctypes.data + (r - begin) * size, size)


@njit
def store_rows(like, out_at, lse_at, place, begin, end, unit, parts):
    """Divide the rows' sums by their totals and write them, and if wanted the logarithms of the totals."""
    sums, peaks, totals = parts
    token, num_heads, head, group, head_size = place
    for r in range(begin, end):
        row = (token + r // group) * num_heads + head * group + r % group  # of flat [T * Hq]
        out = array_at(out_at + row * head_size * itemsize(like), (head_size,), like)
        own, total = sums[(r - begin) * head_size :][:head_size], totals[r - begin]
        share = np.float32(1) / total
        for d in range(head_size):
            out[d] = narrow(own[d] * share, like)
        if lse_at != 0:
            array_at(lse_at, (row + 1,), total)[row] = peaks[r - begin] * unit + math.log(total)
