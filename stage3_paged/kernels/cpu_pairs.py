"""Products with blocks of bfloat16 in pairs (`cpu_layout.py`): what `cpu_vectors.py` and `cpu_tiles.py` do with others.

A block is made of lines of 64 bytes, like the weights of `common/model/tiled_linear.py`:

    K of one head    [bs / 16, D / 2, line]    16 tokens by two dimensions each
    V of one head    [D / 16, bs / 2, line]    16 dimensions by two tokens each

One load brings 32 numbers and one instruction multiplies and adds them, where otherwise it takes two loads, two
instructions to widen and two to multiply.  Weights are rounded to bfloat16 for it; sums are not.  Prompts read the
same lines: 16 tokens, a *strip*, have their own wherever their block is.
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
from stage3_paged.kernels.cpu_vectors import AHEAD

INT, INT32 = ir.IntType(64), ir.IntType(32)

ONE = (0,)
"""Shape of a tile over one block or strip, for the last few: as long as there is one side by side."""


@intrinsic
def score_tile(  # noqa: PLR0913, PLR0917
    _, rows, side, runs, index, plane, steps, query, query_row, out, out_block, out_row
):
    """Scores of some rows with 16 tokens of each of some blocks.

    Args:
        rows: tuple as long as there are rows.
        side: tuple as long as there are blocks.
        runs: address of the blocks' addresses, AHEAD more behind them.
        index: of the first.
        plane: bytes from where a block begins to the tokens' first line.
        steps: lines of those tokens, D / 2.
        query: address of the first row, bfloat16.
        query_row: bytes from one row to the next.
        out: address of the first score, float32.
        out_block: bytes from one block's scores to the next one's.
        out_row: bytes from one row of scores to the next.
    """

    def generate(context, builder, signature, arguments):
        runs, index, plane, steps, query, query_row, out, out_block, out_row = arguments[2:]
        sums = [ir.Constant(SUMS, [0.0] * LANES)] * (rows.count * side.count)
        lines, ahead = (
            [_begin(builder, runs, index, first + b, plane) for b in range(side.count)]
            for first in (0, AHEAD)
        )
        sums = _add_lines(builder, sums, lines, ahead, steps, query, query_row)
        for n, total in enumerate(sums):
            row = builder.add(out, builder.mul(INT(n // side.count), out_row))
            builder.store(total, place(builder, row, n % side.count, out_block, SUMS), align=WORD)
        return context.get_dummy_value()

    return types.void(rows, side, *[types.int64] * 9), generate


@intrinsic
def value_tile(  # noqa: PLR0913, PLR0917
    _, rows, side, wide, runs, index, plane, vector, steps, weights, weight_block, weight_row, out, out_row
):
    """Add up some dimensions of the values of some blocks by weight.

    Args:
        rows: tuple as long as there are rows.
        side: tuple as long as there are blocks.
        wide: tuple as long as there are vectors of 16 dimensions.
        runs: address of the blocks' addresses, AHEAD more behind them.
        index: of the first.
        plane: bytes from where a block begins to the first line.
        vector: bytes from the lines of 16 dimensions to those of the next.
        steps: lines of each, pairs of tokens.
        weights: address of the first weight, bfloat16.
        weight_block: bytes from one block's weights to the next one's.
        weight_row: bytes from one row of weights to the next.
        out: address of the first sum, float32; added to.
        out_row: bytes from one row of sums to the next.
    """

    def generate(context, builder, signature, arguments):
        runs, index, plane, vector, steps, weights, weight_block, weight_row, out, out_row = arguments[3:]
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
                    for c in range(wide.count)
                ]
                for n in (b, b + AHEAD)
            )
            own = builder.add(weights, builder.mul(INT(b), weight_block))
            sums = _add_lines(builder, sums, lines, ahead, steps, own, weight_row)
        for total, at in zip(sums, stored, strict=True):
            builder.store(total, at, align=WORD)
        return context.get_dummy_value()

    return types.void(rows, side, wide, *[types.int64] * 10), generate


def _begin(builder, runs, index, n, plane):
    """Address of the lines that are `plane` bytes into the n-th block from `index` on."""
    pointer = place(builder, builder.add(runs, builder.mul(index, INT(8))), n, INT(8), INT)
    return builder.add(builder.load(pointer), plane)


def _add_lines(builder, sums, lines, ahead, steps, words, word_row):
    """Add products of rows of words with lines, for each row all vectors of lines; ask for as many lines ahead."""
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
        return [
            add_products(builder, types.uint16, total, *pair) for total, pair in zip(sums, pairs, strict=True)
        ]

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
def list_strips(table, keys_at, values_at, first, length, sizes, strips):
    """Write where the strips of a sequence lie.

    Args:
        table: block numbers.
        keys_at: address of K.
        values_at: address of V.
        first: position from which on they are wanted, where a block begins.
        length: positions that there are, counted from the sequence's first.
        sizes: Hkv, D, bs.
        strips: `[2, n]`, of K and of V; behind the last there is, it comes again.
    """
    num_kv_heads, head_size, block_size = sizes
    block_bytes = num_kv_heads * head_size * block_size * 2
    for i in range(strips.shape[1]):
        strip = min(first // LANES + i, (length - 1) // LANES)
        block = np.int64(table[strip * LANES // block_size]) * block_bytes
        within = strip % (block_size // LANES) * LINE
        strips[0, i] = keys_at + block + within * (head_size // 2)
        strips[1, i] = values_at + block + within * (LANES // 2)


@njit
def score_strips(rows, side, strips, first, count, plane, tall, head_size, query, scores, width):  # noqa: PLR0913, PLR0917
    """Scores of some rows with `count` strips, which as many as there are in `side` divide.

    Args:
        rows: tuple as long as tiles are high.
        side: tuple as long as they have strips.
        strips: address of those of K.
        first: which of them is the first.
        count: strips.
        plane: bytes from where a block begins to this KV head.
        tall: rows, whole tiles.
        head_size: D.
        query: address of the rows, `[tall, D]` bfloat16.
        scores: address of float32 `[tall, width]`; written.
        width: see there.
    """
    for i in range(0, tall, len(rows)):
        for n in range(0, count, len(side)):
            own, out = query + i * head_size * 2, scores + (i * width + n * LANES) * 4
            score_tile(
                rows, side, strips, first + n, plane, head_size // 2, own, head_size * 2, out, LINE, width * 4
            )


@njit
def weigh_strips(rows, side, wide, strips, first, count, place, tall, head_size, weights, sums, width, spare):  # noqa: PLR0913, PLR0917
    """Add up the values of `count` positions from the strip `first` on by weight.

    Args:
        rows: tuple as long as tiles are high.
        side: tuple as long as they have strips.
        wide: tuple as long as they have vectors.
        strips: address of those of V.
        first: which of them is the first.
        count: positions.
        place: bytes from where a block begins to this KV head, and from 16 dimensions of it to the next.
        tall: rows, whole tiles.
        head_size: D.
        weights: address of bfloat16 `[tall, width]`.
        sums: address of float32 `[tall, D]`; added to.
        width: see there.
        spare: room for `[D + 16]` uint32 and `[1 + AHEAD]` int64.
    """
    plane, vector = place
    last, alone = spare
    at = (last.ctypes.data + LINE - 1) // LINE * LINE
    alone[:] = at
    if count % 2 == 1:  # the last position's neighbour may be NaN
        strip = array_at(strips, (first + count // LANES + 1,), np.int64(0))[first + count // LANES]
        for c in range(head_size // LANES):
            line = array_at(strip + plane + c * vector + count % LANES // 2 * LINE, (LANES,), uint32(0))
            array_at(at + c * LINE, (LANES,), uint32(0))[:] = line & np.uint32(0xFFFF)
    for i in range(0, tall, len(rows)):
        own = weights + i * width * 2
        for c in range(0, head_size // LANES, len(wide)):
            out, near, n = sums + (i * head_size + c * LANES) * 4, plane + c * vector, 0
            while (n + len(side)) * LANES <= count:
                value_tile(rows, side, wide, strips, first + n, near, vector, LANES // 2, own + n * LINE // 2,
                           LINE // 2, width * 2, out, head_size * 4)  # fmt: skip
                n += len(side)
            while n * LANES < count:
                pairs = min(LANES, count - n * LANES) // 2
                value_tile(rows, ONE, wide, strips, first + n, near, vector, pairs, own + n * LINE // 2, LINE // 2,
                           width * 2, out, head_size * 4)  # fmt: skip
                n += 1
            if count % 2 == 1:
                value_tile(rows, ONE, wide, alone.ctypes.data, 0, c * LINE, LINE, 1, own + (count - 1) * 2, LINE // 2,
                           width * 2, out, head_size * 4)  # fmt: skip
