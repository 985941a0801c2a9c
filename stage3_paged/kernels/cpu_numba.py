"""The compiled half of the CPU kernel: read `attend_piece` first, it is the whole algorithm.

A *piece* is one query token with up to `PIECE` positions of its context.  The two products of attention,
scores = q K and out = weights V, are `tile_product`; between them lies the softmax, and `merge_pieces` joins
the pieces of a long context.  All of a call is one launch, `attend_short`: a decode step makes one for every
layer, and each separate step in Python cost as much as reading some hundred kB.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange
from numba.extending import overload

from common.compiled import LANES, LINE, WORD, array_at, compiled, narrow
from stage3_paged.kernels import cpu_blocks, cpu_lines, cpu_softmax, cpu_vectors
from stage3_paged.kernels.cpu_blocks import (
    count_tokens,
    find_bad_block,
    list_runs,
    load_query,
    plan_pieces,
)
from stage3_paged.kernels.cpu_lines import ONE, score_tile, value_tile, weigh_position
from stage3_paged.kernels.cpu_softmax import exponentiate, largest, power
from stage3_paged.kernels.cpu_vectors import (
    AHEAD,
    add_tile_product,
    factors,
    itemsize,
    room,
    tile_product,
    weights_of,
)

PIECE = 512
"""Positions per piece.  Pieces begin at multiples of it, whatever else is in the batch and however many
threads there are: so the same sums are made in the same order, and a neighbour changes no bit."""


@compiled(cpu_blocks, cpu_lines, cpu_softmax, cpu_vectors, parallel=True)
def attend_short(  # noqa: PLR0913, PLR0917
    rows,
    side,
    lanes,
    value_lanes,
    word,
    like,
    sizes,
    q_row,
    unit,
    scale,
    window,
    longest,
    q_at,
    keys_at,
    values_at,
    tables_at,
    start_at,
    lens_at,
    out_at,
    lse_at,
    workers,
):
    """Attend with all queries of at most `longest` tokens, each thread reading the same number of positions.

    Args:
        rows: tuple as long as the tiles are high: query heads handled together, see `_tile_product`.
        side: tuple as long as blocks are read side by side, at most AHEAD.
        lanes: tuple of n numbers for score tiles 2 ** n wide, a divisor of bs.
        value_lanes: the same for value tiles, whose width divides D.
        word: tuple as long as numbers share a word of a line, see `cpu_layout.numbers_per_word`.
        like: a number of the type of q, see `common.compiled.LIKE`.
        sizes: tuple of B, max blocks, N, bs, Hkv, D, Hq.
        q_row: bytes from one token of q to the next.
        unit: what a score is multiplied by for `lse`: `scale` may have made it one for powers of 2.
        scale: factor on the scores, above 0.
        window: sliding window, or 0.
        longest: the longest query that counts as short.
        q_at: address of q, `[T, Hq, D]`.
        keys_at: address of K, `[N, Hkv, D, bs]`.
        values_at: address of V, `[N, Hkv, bs, D]`.
        tables_at: address of the block tables, `[B, max blocks]` int32.
        start_at: address of query_start, `[B + 1]` int32.
        lens_at: address of seq_lens, `[B]` int32.
        out_at: address of the result, `[T, Hq, D]`; rows of longer queries are not written.
        lse_at: address of `[T, Hq]` for the logarithms of the sums of weights, likewise; or 0.
        workers: number of threads.

    Returns:
        -1; or, before anything is read, the first sequence with a block outside the cache.
    """
    num_seqs, max_blocks, num_blocks, block_size, num_kv_heads, head_size, num_heads = sizes
    block_bytes = num_kv_heads * head_size * block_size * itemsize(like)
    block_tables = array_at(tables_at, (num_seqs, max_blocks), np.int32(0))
    query_start = array_at(start_at, (num_seqs + 1,), np.int32(0))
    seq_lens = array_at(lens_at, (num_seqs,), np.int32(0))
    bad = find_bad_block(block_tables, seq_lens, num_blocks, block_size)
    if bad >= 0:
        return bad
    pieces = plan_pieces(query_start, seq_lens, window, longest, PIECE)
    sums = room(len(pieces) * num_heads * head_size, like)  # flat [P, Hq, D]
    peaks = room(len(pieces) * num_heads, like).reshape(len(pieces), num_heads)  # [P, Hq]
    totals = np.empty_like(peaks)  # [P, Hq]
    total = count_tokens(pieces)
    for worker in prange(workers):
        query = factors(num_heads * head_size, like, word)  # flat [Hq, D]
        scores = room(num_heads * row_length(block_size), like)  # flat [Hq, PIECE + bs]
        weights = weights_of(scores, word)  # flat [Hq, PIECE + bs]
        runs = np.empty(2 * (PIECE // block_size + 2) + AHEAD, dtype=np.int64)
        done = 0
        for p in range(len(pieces)):
            if total * worker // workers <= done < total * (worker + 1) // workers:
                load_query(like, word, q_at, q_row, pieces[p, 0], query)
                list_runs(keys_at, values_at, block_bytes, block_tables, block_size, pieces, p, runs)
                parts = sums[p * num_heads * head_size :][: num_heads * head_size], peaks[p], totals[p]
                # Made here: numba hands threads no tuple of tuples.
                tile = rows, side, lanes, value_lanes, word
                shape = num_heads, num_kv_heads, block_size, head_size
                rooms = query, runs, scores, weights
                attend_piece(tile, like, shape, scale, pieces[p, 2], pieces[p, 3], rooms, parts)
            done += pieces[p, 3] - pieces[p, 2]
    for p in prange(len(pieces)):
        if p == 0 or pieces[p, 0] != pieces[p - 1, 0]:
            merge_pieces(like, pieces, p, (sums, peaks, totals), head_size, out_at, lse_at, unit)
    return -1


@njit
def attend_piece(tile, like, sizes, scale, first, last, rooms, parts):
    """Attend with all heads of one token over one piece of its context.

    All KV heads of a block lie together and are read together: runs of 6 kB came 10 % faster than of 2 kB.

    Args:
        tile: rows, side, lanes, value_lanes and word of `attend_short`.
        like: a number of the type of K and V.
        sizes: Hq, Hkv, bs, D.
        scale: factor on the scores.
        first: first position of the piece.
        last: the one behind its last.
        rooms: query, flat `[Hq, D]`; addresses of the piece's blocks, see `list_runs`; room for scores and weights,
            each flat `[Hq, PIECE + bs]`, whole vectors.
        parts: weighted sum (flat `[Hq, D]`), largest scores and sums of weights (each `[Hq]`); written.
    """
    rows, side, lanes, value_lanes, word = tile
    query, runs, scores, weights = rooms
    sums, peaks, totals = parts
    num_heads, _, block_size, _ = sizes
    start = first - first % block_size
    first, last = first - start, last - start
    count = (last + block_size - 1) // block_size
    j = 0
    while j < count:
        if j + len(side) <= count:
            score_blocks((rows, side, lanes), word, like, sizes, query, runs, j, scores)
            j += len(side)
        else:
            score_blocks((rows, ONE, lanes), word, like, sizes, query, runs, j, scores)
            j += 1
    width = row_length(block_size)
    for head in range(num_heads):
        # Only what lies in [first, last) takes part; the rest of a block may hold anything, NaN too.
        row, weight = scores[head * width :][:width], weights[head * width :][:width]
        peaks[head] = largest(row, first, last) * scale
        totals[head] = exponentiate(row, first, last, scale, peaks[head], weight, weight[0])
    sums[:] = 0
    j = 0
    while j < count:
        near = max(first, j * block_size)
        if first <= j * block_size and (j + len(side)) * block_size <= last:
            shape = (rows, side, value_lanes)
            weigh_blocks(shape, word, like, sizes, weights, near, block_size, runs, count + j, sums)
            j += len(side)
        else:
            far = min(last, (j + 1) * block_size)
            shape = (rows, ONE, value_lanes)
            weigh_blocks(shape, word, like, sizes, weights, near, far - near, runs, count + j, sums)
            j += 1


def score_blocks(shape, word, like, sizes, query, runs, j, scores):
    """Scores of one token's heads with all tokens of the blocks from j on, as many as `shape` has."""
    raise NotImplementedError("compiled code only")


@overload(score_blocks)
def _score_blocks(shape, word, like, sizes, query, runs, j, scores):
    def alone(shape, word, like, sizes, query, runs, j, scores):
        num_heads, num_kv_heads, block_size, head_size = sizes
        group, width = num_heads // num_kv_heads, row_length(block_size)
        for head in range(0, num_heads, len(shape[0])):
            plane = (head // group) * block_size * head_size  # where this KV head lies in a block
            rows = (query, head * head_size, 0, head_size)  # [rows, D], the same for all blocks
            for t in range(0, block_size, 1 << len(shape[2])):
                k = (runs, j, plane + t, block_size)  # of each [D, lanes]: why tokens are innermost
                out = (scores, head * width + j * block_size + t, block_size, width)  # of each [rows, lanes]
                tile_product(like, shape, rows, k, head_size, out)

    def in_lines(shape, word, like, sizes, query, runs, j, scores):
        num_heads, num_kv_heads, block_size, head_size = sizes
        group, width = num_heads // num_kv_heads, row_length(block_size)
        row = head_size * itemsize(like)
        for head in range(0, num_heads, len(shape[0])):
            rows_at = query.ctypes.data + head * row  # [rows, D]
            for t in range(0, block_size, LANES):
                plane = ((head // group) * block_size + t) * row  # bytes; of each block D / w lines
                out = scores.ctypes.data + (head * width + j * block_size + t) * 4  # of each [rows, 16]
                score_tile(like, shape[0], shape[1], ONE, runs.ctypes.data, j, plane, row // WORD, rows_at, row, out,
                           block_size * 4, width * 4)  # fmt: skip

    return in_lines if word.count else alone


def weigh_blocks(shape, word, like, sizes, weights, first, n, runs, j, sums):
    """Add up V of some blocks by weight, from position `first` of the piece on n tokens of each: sums `[Hq, D]`."""
    raise NotImplementedError("compiled code only")


@overload(weigh_blocks)
def _weigh_blocks(shape, word, like, sizes, weights, first, n, runs, j, sums):
    def alone(shape, word, like, sizes, weights, first, n, runs, j, sums):
        num_heads, num_kv_heads, block_size, head_size = sizes
        group, width = num_heads // num_kv_heads, row_length(block_size)
        skipped = first % block_size * head_size
        for head in range(0, num_heads, len(shape[0])):
            plane = (head // group) * block_size * head_size
            weight = (weights, head * width + first, block_size, width)  # of each [rows, n]
            for d in range(0, head_size, 1 << len(shape[2])):
                v = (runs, j, plane + skipped + d, head_size)  # of each [n, lanes]
                out = (sums, head * head_size + d, 0, head_size)  # [rows, lanes], the same for all blocks
                add_tile_product(like, shape, weight, v, n, out)

    def in_lines(shape, word, like, sizes, weights, first, n, runs, j, sums):
        num_heads, num_kv_heads, block_size, head_size = sizes
        group, width = num_heads // num_kv_heads, row_length(block_size)
        near, far = first + first % len(word), (first + n) // len(word) * len(word)
        if first < near:  # an end without the other half of its word
            weigh_position(sizes, weights, width, first, runs[j], sums)
        if far < first + n:
            weigh_position(sizes, weights, width, far, runs[j], sums)
        each = itemsize(like)
        skipped, vector = near % block_size // len(word) * LINE, block_size // len(word) * LINE
        for head in range(0, num_heads, len(shape[0])):
            plane = (head // group) * block_size * head_size * each + skipped  # bytes
            weight = weights.ctypes.data + (head * width + near) * each  # of each block [rows, n]
            for d in range(0, head_size, len(vectors) * LANES):
                v = plane + d // LANES * vector  # bs / w lines for each 16 dimensions
                out = sums.ctypes.data + (head * head_size + d) * 4  # [rows, lanes], the same for all blocks
                value_tile(like, shape[0], shape[1], vectors, ONE, runs.ctypes.data, j, v, vector,
                           (far - near) // len(word), weight, block_size * each, width * each, out,
                           head_size * 4)  # fmt: skip

    vectors = (0,) * (2 ** shape[2].count // LANES)
    return in_lines if word.count else alone


@njit
def row_length(block_size):
    """Room for the scores of a piece that begins within a block, in whole vectors."""
    return PIECE + (block_size + LANES - 1) // LANES * LANES


@njit
def merge_pieces(like, pieces, p, parts, head_size, out_at, lse_at, unit):
    """Join all pieces of the token of piece p into its row of the result, dividing by the sum of weights at last.

    Each piece scaled its weights by its own largest score; bring them to the largest of all.  No piece is
    empty, so no largest score is -inf, and the difference of two of them is a number.
    """
    sums, peaks, totals = parts
    row, end, num_heads = pieces[p, 0], p + 1, peaks.shape[1]
    while end < len(pieces) and pieces[end, 0] == row:
        end += 1
    out = array_at(out_at, ((row + 1) * num_heads, head_size), like)  # [T * Hq, D] up to this row
    lse = array_at(lse_at, ((row + 1) * num_heads,), peaks.dtype.type(0))  # [T * Hq], never read if at 0
    for head in range(num_heads):
        peak = peaks[p:end, head].max()
        total = sums.dtype.type(0)
        for i in range(p, end):
            peaks[i, head] = power(peaks[i, head] - peak)  # what this piece's weights are worth now
            total += peaks[i, head] * totals[i, head]
        if lse_at != 0:
            lse[row * num_heads + head] = peak * unit + math.log(total)
        own = sums[(p * num_heads + head) * head_size :][:head_size]
        for i in range(p, end):
            other = sums[(i * num_heads + head) * head_size :][:head_size]
            share = peaks[i, head] / total
            for d in range(head_size):
                own[d] = share * other[d] + (own[d] if i > p else 0)
        for d in range(head_size):
            out[row * num_heads + head, d] = narrow(own[d], like)
