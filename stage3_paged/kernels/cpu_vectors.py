"""The product that both halves of attention are made of where blocks are plain, written as vectors for LLVM.

Blocks in lines have `cpu_lines.py` for it.  Most else of the CPU kernel is plain numba (`cpu_numba.py`); for products
and powers the compiler had to be led by hand.
"""

from __future__ import annotations

from itertools import product as product_of

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.cgutils import unpack_tuple
from numba.extending import intrinsic, overload
from numba.np.arrayobj import make_array

from common.compiled import array_at, multiply_add, prefetch, repeat, splat

CACHE_LINE = 64
"""Bytes; where lines are longer, some are asked for twice."""

AHEAD = 4
"""How many blocks ahead memory is asked for.  Blocks lie anywhere, which hides the pattern from the hardware's
own prefetcher: without this a decode took 1.8 times as long."""

INT = ir.IntType(64)


def _tile_product(accumulate):
    """Make the one part that is written as vectors, since LLVM did not find them by itself (3 x slower).

    The function made reads some blocks side by side, as one alone does not keep enough loads in flight.  With
    all sums held in registers the while, it computes, where b counts the blocks,

        out[b, r, :] = sum over i < n of weights[r, i] * x[b, i, :]                     (tile_product)
        out[r, :] += sum over i < n and over b of weights[b, r, i] * x[b, i, :]         (add_tile_product)

    and asks for the memory AHEAD blocks on at the pace at which it reads `x`.  Arguments:

        like: a number of the type of x, see `common.compiled.LIKE`.
        shape: tuples `(0,) * rows, (0,) * blocks, (0,) * log2(lanes)`.  A tuple's length is part of its type,
            so all are known when the code is made.  (The logarithm, because numba hands each number of a tuple
            to each thread, which for 64 of them took 10 us.)
        weights, out: (flat array, first element, elements from one block to the next, from one row to the next).
        x: (array of the blocks' addresses, index of the first, element where each begins, elements per row).
        n: rows of x.
    """

    @intrinsic
    def product(_, like, shape, weights, x, n, out):
        def generate(context, builder, signature, arguments):
            rows, blocks, lanes = shape[0].count, shape[1].count, 2 ** shape[2].count
            vector = ir.VectorType(context.get_data_type(out[0].dtype), lanes)
            align, x_bytes = out[0].dtype.bitwidth // 8, like.bitwidth // 8
            weight_at, out_at = (_operand(context, builder, signature.args[i], arguments[i]) for i in (2, 5))
            spans = range(blocks), range(AHEAD, AHEAD + blocks)
            x_at, ahead_at = (_blocks(context, builder, like, x, arguments[3], own) for own in spans)
            places = [(b, r) for b in range(1 if accumulate else blocks) for r in range(rows)]
            stored = [builder.bitcast(out_at(b, r, 0), vector.as_pointer()) for b, r in places]
            zero = ir.Constant(vector, [0.0] * lanes)
            sums = [builder.load(place, align=align) if accumulate else zero for place in stored]

            def step(i, sums):
                for b, column in product_of(range(blocks), range(0, lanes, CACHE_LINE // x_bytes)):
                    prefetch(builder, ahead_at(b, i, column))
                sums = dict(zip(places, sums, strict=True))
                for b in range(blocks):
                    values = _load_vector(builder, x_at(b, i, 0), like, vector)  # [lanes]
                    for r in range(rows):
                        weight = splat(builder, builder.load(weight_at(b, r, i)), vector)
                        place = (0 if accumulate else b, r)
                        sums[place] = multiply_add(builder, weight, values, sums[place])
                return list(sums.values())

            for total, place in zip(repeat(builder, arguments[4], sums, step), stored, strict=True):
                builder.store(total, place, align=align)
            return context.get_dummy_value()

        return types.void(like, shape, weights, x, n, out), generate

    return product


def _operand(context, builder, kind, operand):
    """Function (block, row, column) -> pointer into `weights` or `out`."""
    array, first, apart, stride = unpack_tuple(builder, operand)
    data = builder.gep(make_array(kind[0])(context, builder, array).data, [first])

    def pointer(*place):
        block, row, column = (INT(x) if isinstance(x, int) else x for x in place)
        start = builder.add(builder.mul(block, apart), builder.mul(row, stride))
        return builder.gep(data, [builder.add(start, column)])

    return pointer


def _blocks(context, builder, like, kind, operand, own):
    """Function (block, row, column) -> pointer into those blocks of x."""
    array, index, first, stride = unpack_tuple(builder, operand)
    addresses = make_array(kind[0])(context, builder, array).data
    element = context.get_data_type(like).as_pointer()
    starts = []
    for block in own:  # loaded here, since LLVM takes no load out of a loop that asks for memory
        address = builder.load(builder.gep(addresses, [builder.add(index, INT(block))]))
        starts.append(builder.gep(builder.inttoptr(address, element), [first]))

    def pointer(block, row, column):
        return builder.gep(starts[block], [builder.add(builder.mul(row, stride), INT(column))])

    return pointer


def _load_vector(builder, pointer, dtype, vector):
    """Load a vector and widen it."""
    lanes = vector.count
    if dtype in (types.float32, types.float64):
        return builder.load(builder.bitcast(pointer, vector.as_pointer()), align=dtype.bitwidth // 8)
    if dtype == types.int16:
        half = ir.VectorType(ir.HalfType(), lanes)
        return builder.fpext(builder.load(builder.bitcast(pointer, half.as_pointer()), align=2), vector)
    short, word = (ir.VectorType(ir.IntType(bits), lanes) for bits in (16, 32))
    bits = builder.zext(builder.load(builder.bitcast(pointer, short.as_pointer()), align=2), word)
    return builder.bitcast(builder.shl(bits, ir.Constant(word, [16] * lanes)), vector)


tile_product = _tile_product(accumulate=False)
add_tile_product = _tile_product(accumulate=True)


@njit
def copy_row(source, target, size):
    """Copy so many bytes, a multiple of 8, between two addresses; as slices of arrays it takes ten times as long."""
    source_words = array_at(source, (size // 8,), np.uint64(0))
    target_words = array_at(target, (size // 8,), np.uint64(0))
    for i in range(size // 8):
        target_words[i] = source_words[i]


def itemsize(like):
    """Bytes of a number like this."""
    raise NotImplementedError("compiled code only")


@overload(itemsize)
def _itemsize(like):
    size = like.bitwidth // 8
    return lambda like: size


def room(n, like):
    """Room for n sums of numbers like this: float32, or float64 for float64."""
    raise NotImplementedError("compiled code only")


@overload(room)
def _room(n, like):
    number = np.float64 if like == types.float64 else np.float32
    return lambda n, like: np.empty(n, dtype=number)


def factors(n, like, word):
    """Room for n numbers to multiply with: widened to sums, or where pairs are multiplied, as they are stored."""
    raise NotImplementedError("compiled code only")


@overload(factors)
def _factors(n, like, word):
    if word.count == 2:
        return lambda n, like, word: np.empty(n, np.uint16)
    return lambda n, like, word: room(n, like)


def weights_of(scores, word):
    """Room for the weights that scores become: the same, or where pairs are multiplied, as long in bfloat16."""
    raise NotImplementedError("compiled code only")


@overload(weights_of)
def _weights_of(scores, word):
    if word.count == 2:
        return lambda scores, word: np.empty(len(scores), np.uint16)
    return lambda scores, word: scores
