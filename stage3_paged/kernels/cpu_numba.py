"""The compiled half of the CPU kernel: read `attend_piece` first, it is the whole algorithm.

A *piece* is one query token with up to `PIECE` positions of its context.  The two products of attention,
scores = q K and out = weights V, are `tile_product`; between them lies the softmax, and `merge_pieces` joins
the pieces of a long context.  What it calls is compiled into it, and numba's cache on disk notices changes of
this file alone: after an edit to `cpu_vectors.py`, touch this one.

Arrays are flat here, with the layouts of `cpu.make_cache`: K `[N, Hkv, D, bs]`, V `[N, Hkv, bs, D]`.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange, types
from numba.extending import overload

from stage3_paged.kernels.cpu_vectors import add_tile_product, tile_product

PIECE = 512
"""Positions per piece.  Pieces begin at multiples of it, whatever else is in the batch and however many
threads there are: so the same sums are made in the same order, and a neighbour changes no bit."""

AHEAD = 2
"""How many blocks ahead memory is asked for.  Blocks lie anywhere, which hides the pattern from the hardware's
own prefetcher: without this a decode took 1.8 times as long."""

POWERS_OF_LN2 = tuple(np.float32(math.log(2) ** k / math.factorial(k)) for k in range(7))
"""Taylor coefficients of 2 ** f; with |f| <= 1/2 the error is below 2e-7."""


@njit(cache=True, parallel=True)
def attend_pieces(rows, lanes, value_lanes, q, cache, pieces, parts, out, workers):
    """Attend with every piece, split over the threads so that each reads the same number of tokens.

    Args:
        rows: tuple as long as the tiles are high: query heads handled together, see `_tile_product`.
        lanes: tuple of n numbers for score tiles 2 ** n wide, a divisor of bs.
        value_lanes: the same for value tiles, whose width divides D.
        q: flat `[T, Hq, D]`, scaled.
        cache: (flat K, flat V, `[B, max blocks]` block tables, bs, Hkv, D).
        pieces: `[P, 4]` from `cpu_blocks.plan_pieces`.
        parts: (`[P, Hq, D]` flat, `[P, Hq]`, `[P, Hq]`): weighted sum, largest score, sum of weights.
        out: `[T, Hq, D]`, written.
        workers: number of threads.
    """
    total = count_tokens(pieces)
    for worker in prange(workers):
        first, last = total * worker // workers, total * (worker + 1) // workers
        shapes = (rows, lanes), (rows, value_lanes)
        scores = np.empty(out.shape[1] * (PIECE + cache[3]), dtype=q.dtype)  # [Hq, PIECE + bs]
        blocks = np.empty(PIECE // cache[3] + 2, dtype=np.int64)
        done = 0
        for p in range(len(pieces)):
            if first <= done < last:
                attend_piece(shapes, q, cache, pieces, p, parts, scores, blocks)
            done += pieces[p, 3] - pieces[p, 2]
    # Too little work to wake the threads for once more.
    for p in range(len(pieces)):
        if p == 0 or pieces[p, 0] != pieces[p - 1, 0]:
            merge_pieces(pieces, p, parts, out)


@njit
def attend_piece(shapes, q, cache, pieces, p, parts, scores, blocks):
    """Attend with all heads of one token over one piece of its context.

    All KV heads of a block lie together and are read together: runs of 6 kB came 10 % faster than of 2 kB.
    """
    block_tables, block_size, num_kv_heads, head_size = cache[2:]
    sums, peaks, totals = parts
    seq, first, last = pieces[p, 1], pieces[p, 2], pieces[p, 3]
    num_heads = peaks.shape[1]

    # Where do the tokens lie?  This is all that paging adds.
    start = first - first % block_size
    count = 0
    for position in range(start, last, block_size):
        block = block_tables[seq, position // block_size]
        # 64 bits before the product: pools of more than 2^31 elements are ordinary.
        blocks[count] = np.int64(block) * num_kv_heads * block_size * head_size
        count += 1

    score_blocks(shapes[0], q, pieces[p, 0], cache, blocks[:count], num_heads, scores)
    width = PIECE + block_size
    for head in range(num_heads):
        # Only what lies in [first, last) takes part; the rest of a block may hold anything, NaN too.
        row = scores[head * width + first - start : head * width + last - start]
        peaks[p, head] = largest(row)
        totals[p, head] = exponentiate(row, peaks[p, head])
    sums[p * num_heads * head_size : (p + 1) * num_heads * head_size] = 0
    weigh_blocks(
        shapes[1], scores, first - start, last - start, cache, blocks[:count], sums, p * num_heads, num_heads
    )


@njit
def score_blocks(shape, q, row, cache, blocks, num_heads, scores):
    """Scores of one token's heads with all tokens of these blocks: scores `[Hq, PIECE + bs]`."""
    keys, values, _, block_size, num_kv_heads, head_size = cache
    group, count, width = num_heads // num_kv_heads, len(blocks), PIECE + block_size
    for j in range(count):
        after = j + AHEAD
        soon, at = (keys, blocks[after]) if after < count else (values, blocks[min(after - count, count - 1)])
        for head in range(0, num_heads, len(shape[0])):
            plane = (head // group) * block_size * head_size  # where this KV head lies in a block
            query = (q, (row * num_heads + head) * head_size, head_size)  # [rows, D]
            for t in range(0, block_size, 1 << len(shape[1])):
                k = (keys, blocks[j] + plane + t, block_size)  # [D, lanes]: why tokens are innermost
                out = (scores, head * width + j * block_size + t, width)  # [rows, lanes]
                tile_product(shape, query, k, head_size, out, (soon, at + plane + t, block_size))


@njit
def weigh_blocks(shape, weights, first, last, cache, blocks, sums, row, num_heads):
    """Add up V of the tokens first to last of these blocks, by weight: sums `[..., D]` from `row` on."""
    values, _, block_size, num_kv_heads, head_size = cache[1:]
    group, count, width = num_heads // num_kv_heads, len(blocks), PIECE + block_size
    for j in range(count):
        near, far = max(first, j * block_size), min(last, (j + 1) * block_size)
        skipped = (near - j * block_size) * head_size
        at = blocks[min(j + AHEAD, count - 1)]
        for head in range(0, num_heads, len(shape[0])):
            plane = (head // group) * block_size * head_size
            weight = (weights, head * width + near, width)  # [rows, far - near]
            for d in range(0, head_size, 1 << len(shape[1])):
                v = (values, blocks[j] + plane + skipped + d, head_size)  # [far - near, lanes]
                out = (sums, (row + head) * head_size + d, head_size)  # [rows, lanes]
                add_tile_product(shape, weight, v, far - near, out, (values, at + plane + d, head_size))


@njit(fastmath={"nnan", "nsz", "reassoc"})
def largest(row):
    """Largest of a row; the flags let it be found sixteen at a time.  A NaN still spreads: NaN - x is NaN."""
    peak = row[0]
    for score in row:
        peak = max(peak, score)
    return peak


@njit(fastmath={"reassoc", "contract"})
def exponentiate(row, peak):
    """Turn scores into weights, in place; return their sum."""
    total = row.dtype.type(0)
    for i in range(len(row)):
        row[i] = power(row[i] - peak)
        total += row[i]
    return total


def power(x):
    """2 ** x in float32 and e ** x in float64, for x <= 0; the scores are scaled to suit (`cpu.BASE`)."""
    raise NotImplementedError("compiled code only")


@overload(power)
def _power(x):
    """Float32 is made of additions and multiplications only, so that a vector of them is one instruction."""

    def exact(x):
        return math.exp(x)

    def fast(x):
        # NaN passes this comparison unchanged.
        x = np.float32(-126) if x < np.float32(-126) else x
        whole = np.int32(x - np.float32(0.5))  # to the nearest, as x is not positive
        f = x - np.float32(whole)
        y = POWERS_OF_LN2[6]
        for k in (5, 4, 3, 2, 1, 0):
            y = y * f + POWERS_OF_LN2[k]
        exponent = np.int32((whole + 127) << 23)
        return exponent.view(np.float32) * y

    return exact if x == types.float64 else fast


@njit
def count_tokens(pieces):
    """Positions in all pieces together."""
    total = 0
    for p in range(len(pieces)):
        total += pieces[p, 3] - pieces[p, 2]
    return total


@njit
def merge_pieces(pieces, p, parts, out):
    """Join all pieces of the token of piece p into out `[T, Hq, D]`, and divide by the sum of weights at last.

    Each piece scaled its weights by its own largest score; bring them to the largest of all.  No piece is
    empty, so no largest score is -inf, and the difference of two of them is a number.
    """
    sums, peaks, totals = parts
    num_heads, head_size = out.shape[1:]
    row, end = pieces[p, 0], p + 1
    while end < len(pieces) and pieces[end, 0] == row:
        end += 1
    for head in range(num_heads):
        peak = largest(peaks[p:end, head])
        total = out.dtype.type(0)
        for i in range(p, end):
            peaks[i, head] = power(peaks[i, head] - peak)  # what this piece's weights are worth now
            total += peaks[i, head] * totals[i, head]
        out[row, head] = 0
        for i in range(p, end):
            at = (i * num_heads + head) * head_size
            share = peaks[i, head] / total
            for d in range(head_size):
                out[row, head, d] += share * sums[at + d]
