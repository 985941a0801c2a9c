"""The compiled half of the CPU kernel: read `attend_piece` first, it is the whole algorithm.

A *piece* is one query token with up to `PIECE` positions of its context.  The two products of attention,
scores = q K and out = weights V, are `tile_product`; between them lies the softmax, and `merge_pieces` joins
the pieces of a long context.  All of it is in this one file because numba's cache on disk notices changes of
the file it compiles and of no other.

Arrays are flat here, with the layouts of `cpu.make_cache`: K `[N, Hkv, D, bs]`, V `[N, Hkv, bs, D]`.
"""

from __future__ import annotations

import math
import sys

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.core import event
from numba.core.cgutils import get_or_insert_function, unpack_tuple
from numba.extending import intrinsic, overload
from numba.np.arrayobj import make_array

PIECE = 512
"""Positions per piece.  Pieces begin at multiples of it, whatever else is in the batch and however many
threads there are: so the same sums are made in the same order, and a neighbour changes no bit."""

AHEAD = 2
"""How many blocks ahead memory is asked for.  Blocks lie anywhere, which hides the pattern from the hardware's
own prefetcher: without this the kernel ran at 38 % of the bandwidth instead of 67 %."""

POWERS_OF_LN2 = tuple(np.float32(math.log(2) ** k / math.factorial(k)) for k in range(7))
"""Taylor coefficients of 2 ** f; with |f| <= 1/2 the error is below 2e-7."""


@njit(cache=True, parallel=True)
def attend_pieces(shapes, q, cache, pieces, parts, workers):
    """Attend with every piece, split over the threads so that each reads the same number of tokens.

    Args:
        shapes: ((rows, lanes) of the score tile, (rows, lanes) of the value tile), see `tile_product`.
        q: flat `[T, Hq, D]`, scaled.
        cache: (flat K, flat V, `[B, max blocks]` block tables, bs, Hkv, D).
        pieces: `[P, 4]` from `plan_pieces`.
        parts: (`[P, Hq, D]` flat, `[P, Hq]`, `[P, Hq]`): weighted sum, largest score, sum of weights.
        workers: number of threads.
    """
    num_kv_heads = cache[4]
    total = (pieces[:, 3] - pieces[:, 2]).sum() * num_kv_heads
    for worker in prange(workers):
        first, last = total * worker // workers, total * (worker + 1) // workers
        scores = np.empty(len(shapes[0][0]) * (PIECE + cache[3]), dtype=q.dtype)  # [rows, PIECE + bs]
        blocks = np.empty(PIECE // cache[3] + 1, dtype=np.int64)
        done = 0
        for p in range(len(pieces)):
            for kv_head in range(num_kv_heads):
                if first <= done < last:
                    attend_piece(shapes, q, cache, pieces, p, kv_head, parts, scores, blocks)
                done += pieces[p, 3] - pieces[p, 2]


@njit
def attend_piece(shapes, q, cache, pieces, p, kv_head, parts, scores, blocks):
    """Attend with one token's query heads of one KV head over one piece of the context."""
    keys, values, block_tables, block_size, num_kv_heads, head_size = cache
    sums, peaks, totals = parts
    seq, first, last = pieces[p, 1], pieces[p, 2], pieces[p, 3]
    num_heads = peaks.shape[1]
    group, rows = num_heads // num_kv_heads, len(shapes[0][0])

    # Where do the tokens lie?  This is all that paging adds.
    start = first - first % block_size
    count = 0
    for position in range(start, last, block_size):
        block = block_tables[seq, position // block_size]
        # 64 bits before the product: pools of more than 2^31 elements are ordinary.
        blocks[count] = (np.int64(block) * num_kv_heads + kv_head) * (block_size * head_size)
        count += 1

    width = PIECE + block_size
    for head in range(kv_head * group, (kv_head + 1) * group, rows):
        query = (pieces[p, 0] * num_heads + head) * head_size
        score_blocks(shapes[0], (q, query, head_size), keys, values, blocks[:count], block_size, scores)
        for r in range(rows):
            # Only what lies in [first, last) takes part; the rest of a block may hold anything, NaN too.
            row = scores[r * width + first - start : r * width + last - start]
            peaks[p, head + r] = largest(row)
            totals[p, head + r] = exponentiate(row, peaks[p, head + r])
        out = (p * num_heads + head) * head_size
        sums[out : out + rows * head_size] = 0
        for j in range(count):
            near = max(first, start + j * block_size)
            far = min(last, start + (j + 1) * block_size)
            at = blocks[j] + (near - start - j * block_size) * head_size
            if j + AHEAD < count:
                ahead = (values, blocks[j + AHEAD])
            else:  # the keys of the next head lie behind those of this one
                ahead = (keys, blocks[min(j + AHEAD - count, count - 1)] + block_size * head_size)
            for d in range(0, head_size, len(shapes[1][1])):
                weights = (scores, near - start, width)
                v = (values, at + d, head_size)  # [far - near, lanes]
                next_v = (ahead[0], ahead[1] + d)
                add_tile_product(shapes[1], weights, v, far - near, (sums, out + d, head_size), next_v)


@njit
def score_blocks(shape, query, keys, values, blocks, block_size, scores):
    """Scores of a few query heads with all tokens of these blocks: `[rows, PIECE + bs]`."""
    head_size = query[2]
    count = len(blocks)
    for j in range(count):
        if j + AHEAD < count:
            ahead = (keys, blocks[j + AHEAD])
        else:
            ahead = (values, blocks[min(j + AHEAD - count, count - 1)])
        for t in range(0, block_size, len(shape[1])):
            k = (keys, blocks[j] + t, block_size)  # [D, lanes]: this is why tokens are innermost
            out = (scores, j * block_size + t, PIECE + block_size)
            tile_product(shape, query, k, head_size, out, (ahead[0], ahead[1] + t))


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


@njit(cache=True)
def plan_pieces(query_start, seq_lens, window, longest_query):
    """Cut the work of all sequences whose query is at most `longest_query` tokens.

    Returns:
        `[P, 4]` int64: token row, sequence, first position, end; the pieces of a token one after another.
    """
    most = 0
    for seq in range(len(seq_lens)):
        most += (query_start[seq + 1] - query_start[seq]) * (seq_lens[seq] // PIECE + 1)
    pieces = np.empty((most, 4), dtype=np.int64)
    count = 0
    for seq in range(len(seq_lens)):
        begin, end = query_start[seq], query_start[seq + 1]
        if end - begin > longest_query:
            continue
        for row in range(begin, end):
            context = seq_lens[seq] - (end - 1 - row)  # causal: own position is context - 1
            first = max(0, context - window) if window > 0 else 0
            while first < context:
                last = min(context, (first // PIECE + 1) * PIECE)
                pieces[count] = row, seq, first, last
                first = last
                count += 1
    return pieces[:count]
