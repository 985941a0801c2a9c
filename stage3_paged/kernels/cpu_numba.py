"""The compiled half of the CPU kernel: read `attend_piece` first, it is the whole algorithm.

A *piece* is one query token with up to `PIECE` positions of its context.  The two products of attention,
scores = q K and out = weights V, are `tile_product`; between them lies the softmax, and `merge_pieces` joins
the pieces of a long context.  All of a call is one launch, `attend_short`: a decode step makes one for every
layer, and each separate step in Python cost as much as reading some hundred kB.
"""

from __future__ import annotations

import math
import zlib
from pathlib import Path

import numpy as np
from numba import njit, prange, types
from numba.extending import overload

from stage3_paged.kernels.cpu_blocks import find_bad_block, plan_pieces
from stage3_paged.kernels.cpu_vectors import add_tile_product, narrow, room, tile_product, widen

PIECE = 512
"""Positions per piece.  Pieces begin at multiples of it, whatever else is in the batch and however many
threads there are: so the same sums are made in the same order, and a neighbour changes no bit."""

AHEAD = 2
"""How many blocks ahead memory is asked for.  Blocks lie anywhere, which hides the pattern from the hardware's
own prefetcher: without this a decode took 1.8 times as long."""

CODE = zlib.crc32(
    b"".join(Path(__file__).with_name(f"cpu_{n}.py").read_bytes() for n in ("blocks", "vectors"))
)
"""Fingerprint of what is compiled into `attend_short` from other files.  Numba's cache on disk notices changes
of this file alone, and of the types of arguments: the type of one left out holds its default."""

POWERS_OF_LN2 = tuple(np.float32(math.log(2) ** k / math.factorial(k)) for k in range(7))
"""Taylor coefficients of 2 ** f; with |f| <= 1/2 the error is below 2e-7."""


@njit(cache=True, parallel=True)
def attend_short(  # noqa: PLR0913, PLR0917
    rows,
    lanes,
    value_lanes,
    q,
    keys,
    values,
    block_tables,
    query_start,
    seq_lens,
    out,
    lse,
    unit,
    scale,
    window,
    longest,
    workers,
    code=CODE,
):
    """Attend with all queries of at most `longest` tokens, each thread reading the same number of positions.

    Args:
        rows: tuple as long as the tiles are high: query heads handled together, see `_tile_product`.
        lanes: tuple of n numbers for score tiles 2 ** n wide, a divisor of bs.
        value_lanes: the same for value tiles, whose width divides D.
        q: `[T, Hq, D]`; 16-bit floats go as in `cpu_vectors`.
        keys: `[N, Hkv, D, bs]`.
        values: `[N, Hkv, bs, D]`.
        block_tables: `[B, max blocks]`.
        query_start: `[B + 1]`.
        seq_lens: `[B]`.
        out: `[T, Hq, D]`; rows of longer queries are not written.
        lse: `[T, Hq]`, the logarithms of the sums of weights, likewise; or nothing, `[0, 0]`.
        unit: what a score is multiplied by for `lse`: `scale` may have made it one for powers of 2.
        scale: factor on the scores.
        window: sliding window, or 0.
        longest: the longest query that counts as short.
        workers: number of threads.
        code: leave it out, see CODE.

    Returns:
        -1; or, before anything is read, the first sequence with a block outside the cache.
    """
    num_blocks, num_kv_heads, block_size, head_size = values.shape
    bad = find_bad_block(block_tables, seq_lens, num_blocks, block_size)
    if bad >= 0:
        return bad
    pieces = plan_pieces(query_start, seq_lens, window, longest, PIECE)
    cache = keys.reshape(-1), values.reshape(-1), block_tables, block_size, num_kv_heads, head_size
    num_heads = q.shape[1]
    sums = room(len(pieces) * num_heads * head_size, q)  # flat [P, Hq, D]
    peaks = room(len(pieces) * num_heads, q).reshape(len(pieces), num_heads)  # [P, Hq]
    totals = np.empty_like(peaks)  # [P, Hq]
    total = count_tokens(pieces)
    for worker in prange(workers):
        query = room(num_heads * head_size, q)  # flat [Hq, D]
        scores = room(num_heads * (PIECE + block_size), q)  # flat [Hq, PIECE + bs]
        blocks = np.empty(PIECE // block_size + 2 + AHEAD, dtype=np.int64)
        done = 0
        for p in range(len(pieces)):
            if total * worker // workers <= done < total * (worker + 1) // workers:
                load_query(q, pieces[p, 0], scale, query)
                attend_piece(
                    (rows, lanes, value_lanes), query, cache, pieces, p, (sums, peaks, totals), scores, blocks
                )
            done += pieces[p, 3] - pieces[p, 2]
    for p in prange(len(pieces)):
        if p == 0 or pieces[p, 0] != pieces[p - 1, 0]:
            merge_pieces(pieces, p, (sums, peaks, totals), out, lse, unit)
    return -1


@njit
def load_query(q, row, scale, query):
    """Widen one row of q `[T, Hq, D]` into query, flat `[Hq, D]`, and scale it."""
    num_heads, head_size = q.shape[1:]
    for head in range(num_heads):
        for d in range(head_size):
            query[head * head_size + d] = widen(q[row, head, d]) * scale


@njit
def attend_piece(tile, query, cache, pieces, p, parts, scores, blocks):
    """Attend with all heads of one token over one piece of its context.

    All KV heads of a block lie together and are read together: runs of 6 kB came 10 % faster than of 2 kB.

    Args:
        tile: rows, lanes and value_lanes of `attend_short`.
        query: flat `[Hq, D]`.
        cache: (flat K, flat V, `[B, max blocks]` block tables, bs, Hkv, D).
        pieces: `[P, 4]` from `cpu_blocks.plan_pieces`.
        p: which one.
        parts: (`[P, Hq, D]` flat, `[P, Hq]`, `[P, Hq]`): weighted sum, largest score, sum of weights; written.
        scores: room for flat `[Hq, PIECE + bs]`.
        blocks: room for the offsets of all blocks and of AHEAD more.
    """
    block_size, head_size = cache[3], cache[5]
    sums, peaks, totals = parts
    first, last = pieces[p, 2], pieces[p, 3]
    num_heads = peaks.shape[1]
    start = first - first % block_size
    count = (last - start + block_size - 1) // block_size
    list_blocks(cache, pieces[p], blocks[:count])
    list_blocks(cache, pieces[min(p + 1, len(pieces) - 1)], blocks[count : count + AHEAD])
    score_blocks((tile[0], tile[1]), query, cache, blocks, count, num_heads, scores)
    width = PIECE + block_size
    for head in range(num_heads):
        # Only what lies in [first, last) takes part; the rest of a block may hold anything, NaN too.
        row = scores[head * width + first - start : head * width + last - start]
        peaks[p, head] = largest(row)
        totals[p, head] = exponentiate(row, peaks[p, head])
    own = sums[p * num_heads * head_size : (p + 1) * num_heads * head_size]  # flat [Hq, D]
    own[:] = 0
    weigh_blocks(
        (tile[0], tile[2]), scores, first - start, last - start, cache, blocks, count, num_heads, own
    )


@njit
def list_blocks(cache, piece, blocks):
    """Where do the tokens of a piece lie?  This is all that paging adds: offsets of its first blocks."""
    block_tables, block_size, num_kv_heads, head_size = cache[2:]
    seq, first, last = piece[1], piece[2], piece[3]
    for j in range(len(blocks)):
        block = block_tables[seq, min(first // block_size + j, (last - 1) // block_size)]
        # 64 bits before the product: pools of more than 2^31 elements are ordinary.
        blocks[j] = np.int64(block) * num_kv_heads * block_size * head_size


@njit
def score_blocks(shape, query, cache, blocks, count, num_heads, scores):
    """Scores of one token's heads with all tokens of these blocks: scores `[Hq, PIECE + bs]`."""
    keys, values, _, block_size, num_kv_heads, head_size = cache
    group, width = num_heads // num_kv_heads, PIECE + block_size
    for j in range(count):
        after = j + AHEAD
        soon, at = (keys, blocks[after]) if after < count else (values, blocks[min(after - count, count - 1)])
        for head in range(0, num_heads, len(shape[0])):
            plane = (head // group) * block_size * head_size  # where this KV head lies in a block
            rows = (query, head * head_size, head_size)  # [rows, D]
            for t in range(0, block_size, 1 << len(shape[1])):
                k = (keys, blocks[j] + plane + t, block_size)  # [D, lanes]: why tokens are innermost
                out = (scores, head * width + j * block_size + t, width)  # [rows, lanes]
                tile_product(shape, rows, k, head_size, out, (soon, at + plane + t, block_size))


@njit
def weigh_blocks(shape, weights, first, last, cache, blocks, count, num_heads, sums):
    """Add up V of the tokens first to last of these blocks, by weight: sums `[Hq, D]`."""
    keys, values, _, block_size, num_kv_heads, head_size = cache
    group, width = num_heads // num_kv_heads, PIECE + block_size
    for j in range(count):
        near, far = max(first, j * block_size), min(last, (j + 1) * block_size)
        skipped = (near - j * block_size) * head_size
        soon, at = (values if j + AHEAD < count else keys), blocks[j + AHEAD]
        for head in range(0, num_heads, len(shape[0])):
            plane = (head // group) * block_size * head_size
            weight = (weights, head * width + near, width)  # [rows, far - near]
            for d in range(0, head_size, 1 << len(shape[1])):
                v = (values, blocks[j] + plane + skipped + d, head_size)  # [far - near, lanes]
                out = (sums, head * head_size + d, head_size)  # [rows, lanes]
                add_tile_product(shape, weight, v, far - near, out, (soon, at + plane + d, head_size))


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
def merge_pieces(pieces, p, parts, out, lse, unit):
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
        total = sums.dtype.type(0)
        for i in range(p, end):
            peaks[i, head] = power(peaks[i, head] - peak)  # what this piece's weights are worth now
            total += peaks[i, head] * totals[i, head]
        if len(lse) > 0:
            lse[row, head] = peak * unit + math.log(total)
        own = sums[(p * num_heads + head) * head_size :][:head_size]
        for i in range(p, end):
            other = sums[(i * num_heads + head) * head_size :][:head_size]
            share = peaks[i, head] / total
            for d in range(head_size):
                own[d] = share * other[d] + (own[d] if i > p else 0)
        for d in range(head_size):
            out[row, head, d] = narrow(own[d], out)
