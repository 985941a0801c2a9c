"""The softmax between the two products of attention, sixteen numbers at a time.

Written as vectors for LLVM, which found none in a search for the largest number (8 x slower), and went through what
was left of a row one by one: of a causal row that is up to half.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic, overload

from common.compiled import LANES, SUMS, WORDS, multiply_add, repeat, to_bfloat16

INT = ir.IntType(64)
FLAGS = ir.VectorType(ir.IntType(1), LANES)

POWERS_OF_LN2 = tuple(math.log(2) ** k / math.factorial(k) for k in range(7))
"""Taylor coefficients of 2 ** f; with |f| <= 1/2 the error is below 2e-7."""


@njit
def largest(row):
    """Largest of a row in one piece; NaN is passed over, and spreads later: NaN - x is NaN."""
    whole = len(row) // LANES
    peak = largest_of_vectors(row.dtype.type(0), row.ctypes.data, whole)
    for i in range(whole * LANES, len(row)):
        peak = max(peak, row[i])
    return peak


@intrinsic
def largest_of_vectors(_, like, at, count):
    """The largest of so many vectors of numbers like this; -inf of none."""

    def generate(context, builder, signature, arguments):
        vector = ir.VectorType(context.get_data_type(like), LANES)

        def larger(a, b):
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        def step(i, peaks):
            near = builder.add(arguments[1], builder.mul(i, INT(LANES * like.bitwidth // 8)))
            row = builder.load(builder.inttoptr(near, vector.as_pointer()), align=like.bitwidth // 8)
            return [larger(row, peaks[0])]

        (peak,) = repeat(builder, arguments[2], [ir.Constant(vector, [-math.inf] * LANES)], step)
        for half in (8, 4, 2, 1):
            low, high = (
                builder.shuffle_vector(peak, peak, ir.Constant(ir.VectorType(ir.IntType(32), half), lanes))
                for lanes in (list(range(half)), list(range(half, 2 * half)))
            )
            peak = larger(low, high)
        return builder.extract_element(peak, ir.IntType(32)(0))

    return like(like, types.int64, types.int64), generate


def exponentiate(row, scale, peak, out, like):
    """Turn scores into weights, numbers like this: out = 2 ** (row * scale - peak), in float64 e ** (...).

    Both powers serve a softmax, if `scale` suits (`cpu.BASE`).  The smallest, below 2 ** -126, become 0.

    Args:
        row: scores in one piece; none, scaled, is above `peak`.
        scale: factor.
        peak: the largest score, scaled.
        out: as long, in one piece; `row` itself will do.
        like: a number of the type of `out`, see `common.compiled.LIKE`.

    Returns:
        Sum of the weights before they were rounded.
    """
    raise NotImplementedError("compiled code only")


@overload(exponentiate)
def _exponentiate(row, scale, peak, out, like):
    def exact(row, scale, peak, out, like):
        total = 0.0
        for i in range(len(row)):
            out[i] = math.exp(row[i] * scale - peak)
            total += out[i]
        return total

    def fast(row, scale, peak, out, like):
        return powers_of_2(like, row.ctypes.data, len(row), scale, peak, out.ctypes.data)

    return exact if row.dtype == types.float64 else fast


def power(x):
    """2 ** x in float32 and e ** x in float64, for x <= 0; see `exponentiate`."""
    raise NotImplementedError("compiled code only")


@overload(power)
def _power(x):
    def exact(x):
        return math.exp(x)

    def fast(x):
        return np.exp2(x)

    return exact if x == types.float64 else fast


@intrinsic
def powers_of_2(_, like, row, count, scale, peak, out):
    """`exponentiate` in float32, by addresses; made of additions and multiplications only, one instruction each."""

    def generate(context, builder, signature, arguments):
        _, row, count, scale, peak, out = arguments
        narrow = like == types.uint16
        lanes = ir.Constant(WORDS, list(range(LANES)))
        scale, down = (_all(builder, x) for x in (scale, builder.fneg(peak)))

        def step(i, totals):
            first = builder.mul(i, INT(LANES))
            left = _all(builder, builder.trunc(builder.sub(count, first), ir.IntType(32)))
            wanted = builder.icmp_signed("<", lanes, left)
            scores = _load(builder, builder.add(row, builder.mul(first, INT(4))), wanted)
            weights = _power_of_2(builder, multiply_add(builder, scores, scale, down))
            _store(builder, to_bfloat16(builder, weights) if narrow else weights,
                   builder.add(out, builder.mul(first, INT(like.bitwidth // 8))), wanted)  # fmt: skip
            return [builder.fadd(totals[0], weights)]

        vectors = builder.sdiv(builder.add(count, INT(LANES - 1)), INT(LANES))
        (totals,) = repeat(builder, vectors, [ir.Constant(SUMS, [0.0] * LANES)], step)
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType(), SUMS])
        function = get_or_insert_function(builder.module, kind, "llvm.vector.reduce.fadd.v16f32")
        return builder.call(function, [ir.FloatType()(0.0), totals], fastmath=["reassoc"])

    return types.float32(like, types.int64, types.int64, types.float32, types.float32, types.int64), generate


def _power_of_2(builder, x):
    """2 ** x of each lane, for x <= 0: 2 ** whole by its bits, times 2 ** f, f within a half of 0."""

    def number(value):
        return ir.Constant(SUMS, [value] * LANES)

    least = number(-127.0)  # whose bits are those of 0; NaN passes this comparison unchanged
    x = builder.select(builder.fcmp_ordered("<", x, least), least, x)
    kind = ir.FunctionType(SUMS, [SUMS])
    whole = builder.call(get_or_insert_function(builder.module, kind, "llvm.rint.v16f32"), [x])
    f = builder.fsub(x, whole)
    y = number(POWERS_OF_LN2[-1])
    for coefficient in POWERS_OF_LN2[-2::-1]:
        y = multiply_add(builder, y, f, number(coefficient))
    bias, bits = (ir.Constant(WORDS, [n] * LANES) for n in (127, 23))
    exponent = builder.shl(builder.add(builder.fptosi(whole, WORDS), bias), bits)
    return builder.fmul(builder.bitcast(exponent, SUMS), y)


def _all(builder, scalar):
    """The same number in all lanes."""
    vector = ir.VectorType(scalar.type, LANES)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.IntType(32)(0))
    return builder.shuffle_vector(first, first, ir.Constant(WORDS, [0] * LANES))


def _load(builder, at, wanted):
    """The lanes that are wanted; -inf in the others."""
    pointer = builder.inttoptr(at, SUMS.as_pointer())
    kind = ir.FunctionType(SUMS, [pointer.type, ir.IntType(32), FLAGS, SUMS])
    function = get_or_insert_function(builder.module, kind, "llvm.masked.load.v16f32.p0")
    nothing = ir.Constant(SUMS, [-math.inf] * LANES)
    return builder.call(function, [pointer, ir.IntType(32)(4), wanted, nothing])


def _store(builder, lanes, at, wanted):
    """Write the lanes that are wanted."""
    pointer, size = builder.inttoptr(at, lanes.type.as_pointer()), 4 if lanes.type == SUMS else 2
    kind = ir.FunctionType(ir.VoidType(), [lanes.type, pointer.type, ir.IntType(32), FLAGS])
    function = get_or_insert_function(
        builder.module, kind, f"llvm.masked.store.v16{'f32' if size == 4 else 'i16'}.p0"
    )
    builder.call(function, [lanes, pointer, ir.IntType(32)(size), wanted])
