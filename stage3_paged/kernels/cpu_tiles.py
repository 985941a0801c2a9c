"""What `cpu_prompt.py` multiplies with: K and V laid out in lines, and tiles whose sums stay in registers.

A step of a tile takes one line of 64 bytes for each vector of columns and 4 bytes of every row, as in
`common/model/tiled_linear.py`.  In bfloat16 a line of K is two neighbouring dimensions of 16 tokens, a line of V two
neighbouring tokens in 16 dimensions; in float32 one of either.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types, uint32
from numba.extending import intrinsic, overload

from common.compiled import LANES, LINE, SUMS, WORD, WORDS, add_products, array_at, place, repeat, splat
from stage3_paged.kernels.cpu_vectors import itemsize

ALL = (0,) * LANES  # a tuple as long as a vector: compiled code knows it by its length

INT, INT32 = ir.IntType(64), ir.IntType(32)


@njit
def lay_out(bits, lanes, keys_at, values_at, block, k_lines, v_lines, start, length, shape):
    """Lay out one block of all heads, the positions from `start` on; zeros from `length` on in V, whatever lies there.

    A line of weights has zeros there too, and 0 x NaN would be NaN.  What K has there is never looked at.

    Args:
        bits: of the type of the caches' numbers, as integers.
        lanes: tuple as long as a block has tokens, but at most LANES.
        keys_at: address of `[N, Hkv, D, bs]`.
        values_at: address of `[N, Hkv, bs, D]`.
        block: which; -1 if all of its positions are from `length` on.
        k_lines: address of the lines of K.
        v_lines: address of the lines of V.
        start: first position; counted, as `length`, from the first that anybody sees.
        length: positions that there are.
        shape: Hkv, D, bs, and `length` made up to whole key blocks.
    """
    num_heads, head_size, block_size, span = shape
    each = itemsize(bits)
    per = WORD // each  # numbers that share a word
    stop = min(start + block_size, span)
    for head in range(num_heads):
        own = head * span * head_size * each
        plane = (max(block, 0) * num_heads + head) * head_size * block_size * each
        for p in range(start, min(stop, length), len(lanes)):
            line = k_lines + own + (p // LANES * (head_size // per) * LANES + p % LANES) * WORD
            near = keys_at + plane + (p - start) * each
            for d in range(head_size // per):
                row = near + d * per * block_size * each
                join(bits, lanes, row, row + (per - 1) * block_size * each, line + d * LINE)
        values = values_at + plane
        for p in range(start, stop, per):
            row = values + (p - start) * head_size * each
            for c in range(head_size // LANES):
                line, near = v_lines + own + (c * (span // per) + p // per) * LINE, row + c * LANES * each
                if p + per <= length:
                    join(bits, ALL, near, near + (per - 1) * head_size * each, line)
                else:
                    words = array_at(line, (LANES,), uint32(0))
                    words[:] = 0
                    if p < length:  # the last of an odd number
                        words[:] = array_at(near, (LANES,), bits)


@intrinsic
def join(_, bits, lanes, low, high, out):
    """Write words of the numbers that lie at `low` and, if those are half as long, the ones at `high`.

    Args:
        bits: of the numbers' type.
        lanes: tuple as long as there are numbers.
        low: address of the lower halves, or of whole words.
        high: address of the upper halves.
        out: address of the words.
    """

    def generate(context, builder, signature, arguments):
        low, high, out = arguments[2:]
        number, words = (ir.VectorType(ir.IntType(n), lanes.count) for n in (bits.bitwidth, 32))
        whole = builder.zext if bits.bitwidth < 32 else builder.bitcast
        halves = (low, high) if bits.bitwidth < 32 else (low,)
        lower, *upper = (
            whole(builder.load(place(builder, at, 0, INT(0), number), align=2), words) for at in halves
        )
        for half in upper:
            lower = builder.or_(lower, builder.shl(half, ir.Constant(words, [16] * lanes.count)))
        builder.store(lower, place(builder, out, 0, INT(0), words), align=WORD)
        return context.get_dummy_value()

    return types.void(bits, lanes, low, high, out), generate


def numbers(n, like):
    """Room for n numbers like this, all 0."""
    raise NotImplementedError("compiled code only")


@overload(numbers)
def _numbers(n, like):
    kind = np.uint16 if like == types.uint16 else np.float32
    return lambda n, like: np.zeros(n, kind)


@intrinsic
def tile(_, like, high, wide, add, lines, vector, steps, x, x_row, out, out_row):  # noqa: PLR0913, PLR0917
    """Multiply rows of x with lines of K or V: a tile of float32 sums.

    Args:
        like: of the type of both.
        high: tuple as long as the tile has rows.
        wide: tuple as long as it has vectors of columns.
        add: add to what is there; True or False as written in the call.
        lines: address of the first vector's lines, one for each step, one after the other.
        vector: bytes from a vector's lines to the next one's.
        steps: how many words of each row.
        x: address of the first row.
        x_row: bytes from one row to the next.
        out: address of the first sum.
        out_row: bytes from one row of them to the next.
    """
    if not isinstance(add, types.Literal):
        return None

    def generate(context, builder, signature, arguments):
        lines, vector, steps, x, x_row, out, out_row = arguments[4:]
        rows, columns = range(high.count), range(wide.count)
        first = [builder.add(out, builder.mul(INT(r), out_row)) for r in rows]
        stored = [place(builder, row, c, INT(LINE), SUMS) for row in first for c in columns]
        zero = ir.Constant(SUMS, [0.0] * LANES)
        sums = [builder.load(at, align=4) if add.literal_value else zero for at in stored]

        def step(i, sums):
            line = builder.add(lines, builder.mul(i, INT(LINE)))
            loaded = [builder.load(place(builder, line, c, vector, WORDS), align=LINE) for c in columns]
            word_at = builder.add(x, builder.mul(i, INT(WORD)))
            words = [builder.load(place(builder, word_at, r, x_row, INT32), align=2) for r in rows]
            pairs = [(splat(builder, word, WORDS), line) for word in words for line in loaded]
            return [
                add_products(builder, like, total, *pair) for total, pair in zip(sums, pairs, strict=True)
            ]

        for total, at in zip(repeat(builder, steps, sums, step), stored, strict=True):
            builder.store(total, at, align=4)
        return context.get_dummy_value()

    return types.void(like, high, wide, add, *[types.int64] * 7), generate
