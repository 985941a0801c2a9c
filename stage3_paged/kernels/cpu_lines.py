"""Products with blocks that are made of lines (`cpu_layout.py`): what `cpu_vectors.py` does with plain ones.

A line of 64 bytes is sixteen words, each w numbers of what is summed over: one float32, or two of bfloat16.

    K of one head    [bs / 16, D / w, line]    16 tokens by w dimensions each
    V of one head    [D / 16, bs / w, line]    16 dimensions by w tokens each

So a step of a tile loads lines, and multiplies each with a word of every row.  In bfloat16 one load brings 32 numbers
and one instruction multiplies and adds them, where otherwise it takes two loads, two to widen and two to multiply;
weights are rounded to bfloat16 for it, sums are not.  Prompts read the same lines: 16 tokens, a *strip*, have their own
wherever their block is.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types, uint32
from numba.extending import intrinsic

from common.compiled import (
    LANES,
    LINE,
    SUMS,
    WORD,
    WORDS,
    add_products,
    array_at,
    place,
    prefetch,
    repeat,
    splat,
    widen,
)
from stage3_paged.kernels.cpu_vectors import AHEAD, itemsize

INT, INT32 = ir.IntType(64), ir.IntType(32)

ONE = (0,)
"""Shape of a tile over one block or strip, for the last few: as long as there is one side by side."""

NONE = ()
"""Shape of no tile: nothing is asked for."""


@intrinsic
def score_tile(  # noqa: PLR0913, PLR0917
    _, like, rows, side, ask, runs, index, plane, steps, query, query_row, out, out_block, out_row
):
    """Scores of some rows with 16 tokens of each of some blocks.

    Args:
        like: a number of the type of both, see `common.compiled.LIKE`.
        rows: tuple as long as there are rows.
        side: tuple as long as there are blocks.
        ask: tuple with something in it to ask for memory AHEAD blocks on.
        runs: address of the blocks' addresses, and of those that are asked for.
        index: of the first.
        plane: bytes from where a block begins to the tokens' first line.
        steps: lines of those tokens, D / w.
        query: address of the first row.
        query_row: bytes from one row to the next.
        out: address of the first score, float32.
        out_block: bytes from one block's scores to the next one's.
        out_row: bytes from one row of scores to the next.
    """

    def generate(context, builder, signature, arguments):
        runs, index, plane, steps, query, query_row, out, out_block, out_row = arguments[4:]
        sums = [ir.Constant(SUMS, [0.0] * LANES)] * (rows.count * side.count)
        lines, ahead = (
            [_begin(builder, runs, index, first + b, plane) for b in range(blocks)]
            for first, blocks in ((0, side.count), (AHEAD, side.count if ask.count else 0))
        )
        sums = _add_lines(builder, like, sums, lines, ahead, steps, query, query_row)
        for n, total in enumerate(sums):
            row = builder.add(out, builder.mul(INT(n // side.count), out_row))
            builder.store(total, place(builder, row, n % side.count, out_block, SUMS), align=WORD)
        return context.get_dummy_value()

    return types.void(like, rows, side, ask, *[types.int64] * 9), generate


@intrinsic
def value_tile(  # noqa: PLR0913, PLR0917
    _, like, rows, side, wide, ask, runs, index, plane, vector, steps, weights, weight_block, weight_row, out, out_row
):  # fmt: skip
    """Add up some dimensions of the values of some blocks by weight.

    Args:
        like: a number of the type of both, see `common.compiled.LIKE`.
        rows: tuple as long as there are rows.
        side: tuple as long as there are blocks.
        wide: tuple as long as there are vectors of 16 dimensions.
        ask: tuple with something in it to ask for memory AHEAD blocks on.
        runs: address of the blocks' addresses, and of those that are asked for.
        index: of the first.
        plane: bytes from where a block begins to the first line.
        vector: bytes from the lines of 16 dimensions to those of the next.
        steps: lines of each, w tokens.
        weights: address of the first weight.
        weight_block: bytes from one block's weights to the next one's.
        weight_row: bytes from one row of weights to the next.
        out: address of the first sum, float32; added to.
        out_row: bytes from one row of sums to the next.
    """

    def generate(context, builder, signature, arguments):
        runs, index, plane, vector, steps, weights, weight_block, weight_row, out, out_row = arguments[5:]
        stored = [
            place(builder, builder.add(out, builder.mul(INT(r), out_row)), c, INT(LINE), SUMS)
            for r in range(rows.count)
            for c in range(wide.count)
        ]
        sums = [builder.load(at, align=WORD) for at in stored]
        for b in range(side.count):
            lines, ahead = (
                [
                    builder.add(_begin(builder, runs, index, n, plane), builder.mul(INT(c), vector))
                    for c in range(vectors)
                ]
                for n, vectors in ((b, wide.count), (b + AHEAD, wide.count if ask.count else 0))
            )
            own = builder.add(weights, builder.mul(INT(b), weight_block))
            sums = _add_lines(builder, like, sums, lines, ahead, steps, own, weight_row)
        for total, at in zip(sums, stored, strict=True):
            builder.store(total, at, align=WORD)
        return context.get_dummy_value()

    return types.void(like, rows, side, wide, ask, *[types.int64] * 10), generate


def _begin(builder, runs, index, n, plane):
    """Address of the lines that are `plane` bytes into the n-th block from `index` on."""
    pointer = place(builder, builder.add(runs, builder.mul(index, INT(8))), n, INT(8), INT)
    return builder.add(builder.load(pointer), plane)


def _add_lines(builder, like, sums, lines, ahead, steps, words, word_row):
    """Add products of rows of words with lines, for each row all vectors of lines; ask for lines ahead, if any."""
    high = len(sums) // len(lines)

    def step(i, sums):
        near = builder.mul(i, INT(LINE))
        for asked in ahead:
            prefetch(builder, place(builder, builder.add(asked, near), 0, INT(0), ir.IntType(8)))
        loaded = [
            builder.load(place(builder, builder.add(line, near), 0, INT(0), WORDS), align=LINE)
            for line in lines
        ]
        word_at = builder.add(words, builder.mul(i, INT(WORD)))
        rows = [builder.load(place(builder, word_at, r, word_row, INT32), align=2) for r in range(high)]
        pairs = [(splat(builder, word, WORDS), line) for word in rows for line in loaded]
        return [add_products(builder, like, total, *pair) for total, pair in zip(sums, pairs, strict=True)]

    return repeat(builder, steps, sums, step)


@njit
def weigh_position(sizes, weights, width, position, block, sums):
    """Add the values of one position by weight: one whose neighbour in its word takes no part, and may be NaN.

    Args:
        sizes: Hq, Hkv, bs, D.
        weights: flat `[Hq, width]`, whose rows begin where a block does.
        width: of a row of them.
        position: of the weight in its row.
        block: address of the V of its block.
        sums: flat `[Hq, D]`, added to.
    """
    num_heads, num_kv_heads, block_size, head_size = sizes
    offset = position % block_size
    words = array_at(block, (num_kv_heads, head_size // LANES, block_size // 2, LANES), uint32(0))
    up, mask = np.uint32(16 * (1 - offset % 2)), np.uint32(0xFFFF0000)
    for head in range(num_heads):
        weight = widen(weights[head * width + position])
        for c in range(head_size // LANES):
            line = words[head * num_kv_heads // num_heads, c, offset // 2]  # [16]
            own = sums[head * head_size + c * LANES :][:LANES]
            for i in range(LANES):
                own[i] += weight * np.uint32(np.uint32(line[i] << up) & mask).view(np.float32)


@njit
def list_strips(like, table, keys_at, values_at, first, length, sizes, strips):
    """Write where the strips of a sequence lie.

    Args:
        like: a number of the type of K and V.
        table: block numbers.
        keys_at: address of K.
        values_at: address of V.
        first: position from which on they are wanted, where a block begins.
        length: positions that there are, counted from the sequence's first.
        sizes: Hkv, D, bs.
        strips: `[2, n]`, of K and of V.
    """
    num_kv_heads, head_size, block_size = sizes
    line = LANES * itemsize(like)  # bytes of a line that belong to one of what is summed over
    block_bytes = num_kv_heads * head_size * block_size * itemsize(like)
    for i in range((length - first + LANES - 1) // LANES):
        position = first + i * LANES
        block = np.int64(table[position // block_size]) * block_bytes
        within = position % block_size // LANES * line
        strips[0, i] = keys_at + block + within * head_size
        strips[1, i] = values_at + block + within * LANES


@njit
def score_strips(  # noqa: PLR0913, PLR0917
    like, shape, strips, first, count, plane, tall, head_size, query, scores, width
):
    """Scores of some rows with `count` strips.

    Args:
        like: a number of the type of both.
        shape: tuples as long as tiles are high, and as they have strips.
        strips: address of those of K.
        first: which of them is the first.
        count: strips.
        plane: bytes from where a block begins to this KV head.
        tall: rows, whole tiles.
        head_size: D.
        query: address of the rows, `[tall, D]`.
        scores: address of float32 `[tall, width]`; written.
        width: see there.
    """
    rows, side = shape
    row, out_row = head_size * itemsize(like), width * 4
    for i in range(0, tall, len(rows)):
        n, own = 0, query + i * row
        while n < count:
            strip, out = first + n, scores + i * out_row + n * LINE
            if n + len(side) <= count:
                score_tile(
                    like, rows, side, NONE, strips, strip, plane, row // WORD, own, row, out, LINE, out_row
                )
                n += len(side)
            else:
                score_tile(
                    like, rows, ONE, NONE, strips, strip, plane, row // WORD, own, row, out, LINE, out_row
                )
                n += 1


@njit
def weigh_strips(  # noqa: PLR0913, PLR0917
    like, word, shape, strips, first, count, place, tall, head_size, weights, sums, width, spare
):
    """Add up the values of `count` positions from the strip `first` on by weight.

    Args:
        like: a number of the type of both.
        word: tuple as long as numbers share a word of a line, see `cpu_layout.numbers_per_word`.
        shape: tuples as long as tiles are high, as they have strips, and vectors.
        strips: address of those of V.
        first: which of them is the first.
        count: positions.
        place: bytes from where a block begins to this KV head, and from 16 dimensions of it to the next.
        tall: rows, whole tiles.
        head_size: D.
        weights: address of `[tall, width]`; 0 from `count` on up to a whole word.
        sums: address of float32 `[tall, D]`; added to.
        width: see there.
        spare: room for `[D + 16]` uint32 and `[1]` int64.
    """
    rows, side, wide = shape
    plane, vector = place
    strip_bytes, row = LANES * itemsize(like), width * itemsize(like)
    last, alone = spare
    at = (last.ctypes.data + LINE - 1) // LINE * LINE
    alone[:] = at
    if count % len(word) == 1:  # the last position's neighbour may be NaN
        strip = array_at(strips, (first + count // LANES + 1,), np.int64(0))[first + count // LANES]
        for c in range(head_size // LANES):
            line = array_at(strip + plane + c * vector + count % LANES // 2 * LINE, (LANES,), uint32(0))
            array_at(at + c * LINE, (LANES,), uint32(0))[:] = line & np.uint32(0xFFFF)
    for i in range(0, tall, len(rows)):
        own = weights + i * row
        for c in range(0, head_size // LANES, len(wide)):
            out, near, n = sums + (i * head_size + c * LANES) * 4, plane + c * vector, 0
            while (n + len(side)) * LANES <= count:
                value_tile(like, rows, side, wide, NONE, strips, first + n, near, vector, strip_bytes // WORD,
                           own + n * strip_bytes, strip_bytes, row, out, head_size * 4)  # fmt: skip
                n += len(side)
            while n * LANES < count:
                words = min(LANES, count - n * LANES) // len(word)
                value_tile(like, rows, ONE, wide, NONE, strips, first + n, near, vector, words, own + n * strip_bytes,
                           strip_bytes, row, out, head_size * 4)  # fmt: skip
                n += 1
            if count % len(word) == 1:
                value_tile(like, rows, ONE, wide, NONE, alone.ctypes.data, 0, c * LINE, LINE, 1,
                           own + (count - 1) * itemsize(like), strip_bytes, row, out, head_size * 4)  # fmt: skip
