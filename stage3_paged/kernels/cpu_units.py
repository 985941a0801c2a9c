"""The compiled half of `cpu_prompt.py`: read `attend_unit` first, it is the whole algorithm.

A *unit* is some of the rows that share a KV head: every query head of that KV head in every token of a sequence is
one row.  A unit goes along its context key block by key block, so that scores never leave the processor's caches
(Dao et al., "FlashAttention", 2022):

    scores = Q K              rows x BLOCK
    weights                   2 ** (scores - the largest so far), in the type of V; and their sums
    sums = sums + weights V   rows x D

Both products are made in tiles whose sums stay in registers, see `cpu_tiles.py`; for them K and V are laid out anew,
once per call.  Blocks in pairs are read where they lie (`cpu_pairs.py`).
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange
from numba.extending import overload

from common.compiled import LANES, LINE, WORD, array_at, compiled, narrow
from stage3_paged.kernels import cpu_pairs, cpu_softmax, cpu_tiles, cpu_vectors
from stage3_paged.kernels.cpu_pairs import list_strips, score_strips, weigh_strips
from stage3_paged.kernels.cpu_softmax import exponentiate, largest, power
from stage3_paged.kernels.cpu_tiles import lay_out, numbers, tile
from stage3_paged.kernels.cpu_vectors import AHEAD, itemsize

BLOCK = 512  # positions of a key block
HIGH, WIDE = 6, 4  # rows and vectors of a tile: 24 sums, which leave registers for operands
ROWS = 48  # of a unit, at most: with them scores and weights stay in the second-level cache
STEP = WIDE * LANES  # positions of a tile of scores
TALL = -(-ROWS // HIGH) * HIGH  # rows that there is room for
HIGHS, WIDES = (0,) * HIGH, (0,) * WIDE  # a tile's shape as types: compiled code knows it by their lengths

FIELDS, NUM_TOKENS = 7, 2
"""Of each sequence: address of its block table; its first row of q; query tokens; length of its context; first
position that anybody sees, or one before, where a block begins; positions laid out from there; address of its lines, or
of the addresses of its strips: those of K and then those of V."""


@compiled(cpu_pairs, cpu_softmax, cpu_tiles, cpu_vectors, parallel=True)
def attend_units(  # noqa: PLR0913, PLR0917
    like,
    bits,
    lanes,
    pair,
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
    """Lay K and V of some sequences out, then do all units of their queries.

    Args:
        like: a number of the type of q, see `common.compiled.LIKE`.
        bits: an integer as wide.
        lanes: tuple as long as a block has tokens, but at most LANES.
        pair: tuple as long as numbers lie side by side in a word, see `cpu_layout.numbers_per_word`.
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
    for worker in prange(workers):
        shape = num_kv_heads, head_size, block_size  # made here: numba hands threads no tuple of tuples
        for s in range(num_seqs):
            find_or_lay_out(bits, lanes, pair, keys_at, values_at, batch[s], shape, worker, workers)
    for worker in prange(workers):
        query, weights = numbers(TALL * head_size, like), numbers(TALL * BLOCK, like)
        scores, sums = np.empty(TALL * BLOCK, np.float32), np.empty(TALL * head_size, np.float32)
        peaks, totals = np.empty(TALL, np.float32), np.empty(TALL, np.float32)
        spare = np.empty(head_size + LANES, np.uint32), np.empty(1 + AHEAD, np.int64)
        for u in range(worker, len(units), workers):
            s, head, begin, end = units[u]
            _, token, num_tokens, length, first, span, lines = batch[s]
            place = token, num_heads, head, group, head_size
            load_rows(like, q_at, q_row, place, begin, end, query)
            rows = begin, end, group, head_size, length - num_tokens - first, length - first
            at = lines, span, head, num_kv_heads, head_size, block_size
            rooms = scores, weights, sums, peaks, totals, spare
            attend_unit(like, pair, value_wide, rows, at, scale, window, query, rooms)
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


def find_or_lay_out(bits, lanes, pair, keys_at, values_at, sequence, shape, worker, workers):
    """Do one worker's share of a sequence's lines or strips; arguments as of `attend_units`."""
    raise NotImplementedError("compiled code only")


@overload(find_or_lay_out)
def _find_or_lay_out(bits, lanes, pair, keys_at, values_at, sequence, shape, worker, workers):
    def lay_out_share(bits, lanes, pair, keys_at, values_at, sequence, shape, worker, workers):
        num_kv_heads, head_size, block_size = shape
        table_at, _, _, length, first, span, lines = sequence
        table = array_at(table_at, ((length - 1) // block_size + 1,), np.int32(0))
        v_lines = lines + num_kv_heads * span * head_size * itemsize(bits)
        for j in range(worker, (span + block_size - 1) // block_size, workers):
            place = first // block_size + j
            block = np.int64(table[place]) if place < len(table) else np.int64(-1)
            start, end = j * block_size, length - first
            sizes = num_kv_heads, head_size, block_size, span
            lay_out(bits, lanes, keys_at, values_at, block, lines, v_lines, start, end, sizes)

    def find_strips(bits, lanes, pair, keys_at, values_at, sequence, shape, worker, workers):
        table_at, _, _, length, first, span, lines = sequence
        if worker == 0:
            table = array_at(table_at, ((length - 1) // shape[2] + 1,), np.int32(0))
            strips = array_at(lines, (2, span // LANES + AHEAD), np.int64(0))
            list_strips(table, keys_at, values_at, first, length, shape, strips)

    return lay_out_share if pair.count == 1 else find_strips


@njit
def attend_unit(like, pair, value_wide, sizes, at, scale, window, query, rooms):
    """Attend with the rows of `query`, flat `[rows, D]`; `sums`, flat `[rows, D]`, `peaks` and `totals` are written.

    Rows are made up to whole tiles: what comes of the others is never read.
    """
    begin, last, group, head_size, position, length = sizes
    scores, weights, sums, peaks, totals, spare = rooms
    tall = (last - begin + HIGH - 1) // HIGH * HIGH
    sums[:] = 0
    peaks[:] = -np.inf
    totals[:] = 0
    near, end = position + begin // group - window + 1, position + (last - 1) // group + 1
    for start in range(max(0, near) // BLOCK * BLOCK, end, BLOCK):
        width = min(BLOCK, (end - start + STEP - 1) // STEP * STEP)
        score_block(like, pair, at, start, width, tall, query, scores)
        for r in range(last - begin):
            own = position + (begin + r) // group - start  # sees itself and `window - 1` positions before
            row, weight = scores[r * BLOCK :][:width], weights[r * BLOCK :][:width]
            shrink = weigh(
                like, row, weight, max(0, own - window + 1), min(width, own + 1), scale, r, peaks, totals
            )
            if shrink != 1:
                sums[r * head_size : (r + 1) * head_size] *= shrink
        count = min(width, length - start)
        weigh_block(like, pair, value_wide, at, start, count, tall, weights, sums, spare)


def score_block(like, pair, at, start, width, tall, query, scores):
    """Scores of a unit's rows, flat `[rows, BLOCK]`, with a key block: `width` positions from `start` on.

    They lie `at`: address of the sequence's lines or strips, positions that those hold, KV head, Hkv, D, bs.
    """
    raise NotImplementedError("compiled code only")


@overload(score_block)
def _score_block(like, pair, at, start, width, tall, query, scores):
    def of_lines(like, pair, at, start, width, tall, query, scores):
        lines, span, head, _, head_size, _ = at
        each = itemsize(like)
        k_at = lines + (head * span + start) * head_size * each
        for i in range(0, tall, HIGH):
            for p in range(0, width, STEP):
                tile(like, HIGHS, WIDES, False, k_at + p * head_size * each, LANES * head_size * each,
                     head_size * each // WORD, query.ctypes.data + i * head_size * each, head_size * each,
                     scores.ctypes.data + (i * BLOCK + p) * 4, BLOCK * 4)  # fmt: skip

    def of_strips(like, pair, at, start, width, tall, query, scores):
        strips, _, head, _, head_size, block_size = at
        plane = head * block_size * head_size * 2
        score_strips(HIGHS, WIDES, strips, start // LANES, width // LANES, plane, tall, head_size, query.ctypes.data,
                     scores.ctypes.data, BLOCK)  # fmt: skip

    return of_lines if pair.count == 1 else of_strips


def weigh_block(like, pair, value_wide, at, start, count, tall, weights, sums, spare):
    """Add the values of a key block to a unit's sums by weight: the `count` positions of it that there are."""
    raise NotImplementedError("compiled code only")


@overload(weigh_block)
def _weigh_block(like, pair, value_wide, at, start, count, tall, weights, sums, spare):
    def of_lines(like, pair, value_wide, at, start, count, tall, weights, sums, spare):
        lines, span, head, num_kv_heads, head_size, _ = at
        each = itemsize(like)
        v_at = lines + ((num_kv_heads + head) * span * head_size + start * LANES) * each
        width = (count + STEP - 1) // STEP * STEP
        for i in range(0, tall, HIGH):
            for d in range(0, head_size, len(value_wide) * LANES):
                tile(like, HIGHS, value_wide, True, v_at + d * span * each, span * LANES * each,
                     width * each // WORD, weights.ctypes.data + i * BLOCK * each, BLOCK * each,
                     sums.ctypes.data + (i * head_size + d) * 4, head_size * 4)  # fmt: skip

    def of_strips(like, pair, value_wide, at, start, count, tall, weights, sums, spare):
        lines, span, head, _, head_size, block_size = at
        strips = lines + (span // LANES + AHEAD) * 8  # of V
        place = head * block_size * head_size * 2, block_size // 2 * LINE
        weigh_strips(HIGHS, WIDES, value_wide, strips, start // LANES, count, place, tall, head_size,
                     weights.ctypes.data, sums.ctypes.data, BLOCK, spare)  # fmt: skip

    return of_lines if pair.count == 1 else of_strips


@njit
def weigh(like, row, weight, near, far, scale, r, peaks, totals):
    """Turn scores near ... far - 1 of row r into weights, all others into 0; return what earlier sums are worth now."""
    if near >= far:
        weight[:] = 0
        return np.float32(1)
    weight[:near] = 0
    weight[far:] = 0
    peak = max(peaks[r], largest(row[near:far]) * scale)
    shrink = power(peaks[r] - peak)
    total = exponentiate(row[near:far], scale, peak, weight[near:far], like)
    peaks[r], totals[r] = peak, totals[r] * shrink + total
    return shrink


@njit
def load_rows(like, q_at, q_row, place, begin, end, query):
    """Copy rows begin ... end - 1 of one KV head to `query`."""
    token, _, head, group, head_size = place
    for r in range(begin, end):
        own = (head * group + r % group) * head_size * itemsize(like)  # where this head lies in its token
        row = array_at(q_at + (token + r // group) * q_row + own, (head_size,), like)
        query[(r - begin) * head_size :][:head_size] = row


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
