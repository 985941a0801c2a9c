"""The product that both halves of attention are made of, written as vectors for LLVM, and 16-bit floats.

Everything else of the CPU kernel is plain numba (`cpu_numba.py`); only here the compiler had to be led by hand.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function, unpack_tuple
from numba.extending import intrinsic, overload
from numba.np.arrayobj import make_array

CACHE_LINE = 64
"""Bytes; where lines are longer, some are asked for twice."""


def _tile_product(accumulate):
    """Make the one part that is written as vectors, since LLVM did not find them by itself (3 x slower).

    The function made computes, with its `[rows, lanes]` sums held in registers all the while,

        out[r, :] (+)= sum over i < n of weights[r, i] * x[i, :]

    and asks for the memory at `ahead` at the pace at which it reads `x`.  Operands are (flat array, first
    element, elements from one row to the next).  `shape` is a pair of tuples, `((0,) * rows, (0,) * log2(lanes))`:
    a tuple's length is part of its type, so both are known when the code is made.  (The logarithm, because
    numba hands each number of a tuple to each thread, which for 64 of them took 10 us.)
    """

    @intrinsic
    def product(_, shape, weights, x, n, out, ahead):
        def generate(context, builder, signature, arguments):
            rows, lanes = shape[0].count, 2 ** shape[1].count
            vector = ir.VectorType(context.get_data_type(out[0].dtype), lanes)
            align, x_bytes = out[0].dtype.bitwidth // 8, x[0].dtype.bitwidth // 8
            w, x_at, out_at, ahead_at = (
                _operand(context, builder, signature.args[i], arguments[i]) for i in (1, 2, 4, 5)
            )
            out_rows = [builder.bitcast(out_at(r, 0), vector.as_pointer()) for r in range(rows)]
            zero = ir.Constant(vector, [0.0] * lanes)
            sums = [builder.load(row, align=align) if accumulate else zero for row in out_rows]

            def step(i, sums):
                for column in range(0, lanes, CACHE_LINE // x_bytes):
                    _prefetch(builder, ahead_at(i, column))
                values = _load_vector(builder, x_at(i, 0), x[0].dtype, vector)  # [lanes]
                weight = [_splat(builder, builder.load(w(r, i)), vector) for r in range(rows)]
                return [_multiply_add(builder, a, values, b) for a, b in zip(weight, sums, strict=True)]

            for total, row in zip(_repeat(builder, arguments[3], sums, step), out_rows, strict=True):
                builder.store(total, row, align=align)
            return context.get_dummy_value()

        return types.void(shape, weights, x, n, out, ahead), generate

    return product


def _operand(context, builder, kind, operand):
    """Function (row, column) -> pointer into an operand of `product`."""
    array, first, stride = unpack_tuple(builder, operand)
    data = builder.gep(make_array(kind[0])(context, builder, array).data, [first])

    def pointer(row, column):
        row, column = (ir.IntType(64)(x) if isinstance(x, int) else x for x in (row, column))
        return builder.gep(data, [builder.add(builder.mul(row, stride), column)])

    return pointer


def _repeat(builder, n, values, step):
    """Emit `for i in range(n): values = step(i, values)`; return the last values."""
    before = builder.block
    head, body, after = (builder.append_basic_block() for _ in range(3))
    builder.branch(head)
    builder.position_at_end(head)
    i = builder.phi(n.type)
    now = [builder.phi(value.type) for value in values]
    builder.cbranch(builder.icmp_signed("<", i, n), body, after)
    builder.position_at_end(body)
    following = [builder.add(i, n.type(1)), *step(i, now)]
    for phi, start, other in zip([i, *now], [n.type(0), *values], following, strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(other, body)
    builder.branch(head)
    builder.position_at_end(after)
    return now


def _load_vector(builder, pointer, dtype, vector):
    """Load a vector and widen it.

    Numba knows no 16-bit floats.  `uint16` stands for bfloat16, which is the upper half of a float32's bits,
    and `int16` for float16.
    """
    lanes = vector.count
    if dtype in (types.float32, types.float64):
        return builder.load(builder.bitcast(pointer, vector.as_pointer()), align=dtype.bitwidth // 8)
    if dtype == types.int16:
        half = ir.VectorType(ir.HalfType(), lanes)
        return builder.fpext(builder.load(builder.bitcast(pointer, half.as_pointer()), align=2), vector)
    short, word = (ir.VectorType(ir.IntType(bits), lanes) for bits in (16, 32))
    bits = builder.zext(builder.load(builder.bitcast(pointer, short.as_pointer()), align=2), word)
    return builder.bitcast(builder.shl(bits, ir.Constant(word, [16] * lanes)), vector)


def _splat(builder, scalar, vector):
    """The same number in all lanes."""
    word, nothing = ir.IntType(32), ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(nothing, scalar, word(0))
    return builder.shuffle_vector(
        first, nothing, ir.Constant(ir.VectorType(word, vector.count), [0] * vector.count)
    )


def _multiply_add(builder, a, b, c):
    """Product and sum, as one instruction where the machine has it."""
    return builder.fadd(builder.fmul(a, b, flags=["contract"]), c, flags=["contract"])


def _prefetch(builder, pointer):
    """Ask for memory into the second-level cache: the first has too few places for misses (19, not 27 GB/s)."""
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    function = get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, second_level, data = word(0), word(2), word(1)
    builder.call(function, [builder.bitcast(pointer, byte), read, second_level, data])


tile_product = _tile_product(accumulate=False)
add_tile_product = _tile_product(accumulate=True)


def room(n, like):
    """Room for n sums over an array like this: float32, or float64 for float64."""
    raise NotImplementedError("compiled code only")


@overload(room)
def _room(n, like):
    number = np.float64 if like.dtype == types.float64 else np.float32
    return lambda n, like: np.empty(n, dtype=number)


def widen(x):
    """A number of q as one to calculate with."""
    raise NotImplementedError("compiled code only")


@overload(widen)
def _widen(x):
    return {
        types.uint16: lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32),
        types.int16: lambda x: _half_to_float(x),  # noqa: PLW0108 - numba overloads take functions
    }.get(x, lambda x: x)


def narrow(x, like):
    """A sum as an array like this holds it, rounded to the nearest."""
    raise NotImplementedError("compiled code only")


@overload(narrow)
def _narrow(x, like):
    def bfloat16(x, like):
        bits = np.float32(x).view(np.uint32)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        rounded = np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))
        return np.uint16(0x7FC0) if np.isnan(x) else rounded  # a carry could make a NaN infinite

    return {
        types.uint16: bfloat16,
        types.int16: lambda x, like: _float_to_half(x),
    }.get(like.dtype, lambda x, like: x)


@intrinsic
def _half_to_float(_, x):
    """The number whose float16 bits these are."""

    def generate(context, builder, signature, arguments):
        half = builder.bitcast(arguments[0], ir.HalfType())
        return builder.fpext(half, ir.FloatType())

    return types.float32(types.int16), generate


@intrinsic
def _float_to_half(_, x):
    """Bits of the nearest float16."""

    def generate(context, builder, signature, arguments):
        half = builder.fptrunc(arguments[0], ir.HalfType())
        return builder.bitcast(half, ir.IntType(16))

    return types.int16(types.float32), generate
