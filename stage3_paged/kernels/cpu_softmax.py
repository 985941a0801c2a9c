"""The softmax between the two products of attention, sixteen numbers at a time.

Written as vectors for LLVM, which found none in a search for the largest number (8 x slower), and went through what
was left of a row one by one: of a causal row that is up to half.  So rows are read in whole vectors, and a mask says
which numbers take part: what others hold, NaN too, is never calculated with.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic, overload

from common.compiled import LANES, SUMS, WORDS, multiply_add, repeat, splat, to_bfloat16

INT, INT32 = ir.IntType(64), ir.IntType(32)

POWERS_OF_LN2 = tuple(math.log(2) ** k / math.factorial(k) for k in range(7))
"""Taylor coefficients of 2 ** f; with |f| <= 1/2 the error of all is below 2e-7, of the first five 5e-5."""


def largest(row, near, far):
    """Largest of row[near:far], -inf of none; NaN is passed over, and spreads later: NaN - x is NaN.

    The row is in one piece, and can be read up to a whole vector.
    """
    raise NotImplementedError("compiled code only")


@overload(largest)
def _largest(row, near, far):
    def exact(row, near, far):
        peak = -np.inf
        for i in range(near, far):
            peak = max(peak, row[i])
        return peak

    def fast(row, near, far):
        return largest_of_vectors(row.ctypes.data, near, far)

    return exact if row.dtype == types.float64 else fast


@intrinsic
def largest_of_vectors(_, row, near, far):
    """`largest` in float32, by address."""

    def generate(context, builder, signature, arguments):
        row, near, far = arguments
        wanted = _wanted(builder, near, far)

        def larger(a, b):
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        def step(i, peaks):
            lanes = builder.load(_vector(builder, row, i, SUMS, 4), align=4)
            lanes = builder.select(wanted(i), lanes, _number(-math.inf))
            return [larger(lanes, peaks[0])]

        (peak,) = repeat(builder, _vectors(builder, far), [_number(-math.inf)], step)
        for half in (8, 4, 2, 1):
            low, high = (
                builder.shuffle_vector(peak, peak, ir.Constant(ir.VectorType(INT32, half), lanes))
                for lanes in (list(range(half)), list(range(half, 2 * half)))
            )
            peak = larger(low, high)
        return builder.extract_element(peak, INT32(0))

    return types.float32(types.int64, types.int64, types.int64), generate


def exponentiate(row, near, far, scale, peak, out, like):
    """Turn scores near ... far - 1 into weights: out = 2 ** (row * scale - peak), in float64 e ** (...).

    Both powers serve a softmax, if `scale` suits (`cpu.BASE`).  The smallest, below 2 ** -126, become 0 or next to it.

    Args:
        row: scores in one piece; none that takes part, scaled, is above `peak`.
        near: the first that takes part.
        far: the one behind the last.
        scale: factor.
        peak: the largest score, scaled.
        out: in one piece; `row` itself will do.  All others become 0, up to a whole vector; not in float64.
        like: a number of the type of `out`, see `common.compiled.LIKE`.

    Returns:
        Sum of the weights before they were rounded.
    """
    raise NotImplementedError("compiled code only")


@overload(exponentiate)
def _exponentiate(row, near, far, scale, peak, out, like):
    def exact(row, near, far, scale, peak, out, like):
        total = 0.0
        for i in range(near, far):
            out[i] = math.exp(row[i] * scale - peak)
            total += out[i]
        return total

    def fast(row, near, far, scale, peak, out, like):
        return powers_of_2(like, row.ctypes.data, near, far, scale, peak, out.ctypes.data)

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
def powers_of_2(_, like, row, near, far, scale, peak, out):
    """`exponentiate` in float32, by addresses; made of additions and multiplications only, one instruction each."""

    def generate(context, builder, signature, arguments):
        _, row, near, far, scale, peak, out = arguments
        narrow = like == types.uint16
        stored = ir.VectorType(ir.IntType(16), LANES) if narrow else SUMS
        wanted = _wanted(builder, near, far)
        scale, down = (splat(builder, x, SUMS) for x in (scale, builder.fneg(peak)))

        def step(i, totals):
            scores = builder.load(_vector(builder, row, i, SUMS, 4), align=4)
            exponents = multiply_add(builder, scores, scale, down)
            weights = (_power_for_bfloat16 if narrow else _power_of_2)(builder, exponents, wanted(i))
            place = _vector(builder, out, i, stored, like.bitwidth // 8)
            builder.store(to_bfloat16(builder, weights) if narrow else weights, place, align=2)
            return [builder.fadd(totals[0], weights)]

        (totals,) = repeat(builder, _vectors(builder, far), [_number(0.0)], step)
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType(), SUMS])
        function = get_or_insert_function(builder.module, kind, "llvm.vector.reduce.fadd.v16f32")
        return builder.call(function, [ir.FloatType()(0.0), totals], fastmath=["reassoc"])

    number, address = types.float32, types.int64
    return number(like, address, address, address, number, number, address), generate


def _power_of_2(builder, x, wanted):
    """2 ** x of the lanes that are wanted, for x <= 0: 2 ** whole by its bits, times 2 ** f."""
    x = builder.select(wanted, x, _number(-math.inf))
    whole, power = _divide_power(builder, x, terms=6)
    bias, bits = (ir.Constant(WORDS, [n] * LANES) for n in (127, 23))
    exponent = builder.shl(builder.add(builder.fptosi(whole, WORDS), bias), bits)
    return builder.fmul(builder.bitcast(exponent, SUMS), power)


def _power_for_bfloat16(builder, x, wanted):
    """The same, off by a 40th of what rounding to bfloat16 may change.

    It multiplies by 2 ** whole with an instruction of the processors that have blocks in lines (`cpu_layout.py`): only
    those have weights in bfloat16.
    """
    whole, power = _divide_power(builder, x, terms=4)
    flags, nearest = ir.IntType(16), INT32(4)
    kind = ir.FunctionType(SUMS, [SUMS, SUMS, SUMS, flags, INT32])
    function = get_or_insert_function(builder.module, kind, "llvm.x86.avx512.mask.scalef.ps.512")
    return builder.call(function, [power, whole, _number(0.0), builder.bitcast(wanted, flags), nearest])


def _divide_power(builder, x, terms):
    """Divide 2 ** x into (whole, 2 ** f), f within a half of 0: all that is below 2 ** -127 counts as that."""
    least = _number(-127.0)  # whose bits are those of 0; NaN passes this comparison unchanged
    x = builder.select(builder.fcmp_ordered("<", x, least), least, x)
    kind = ir.FunctionType(SUMS, [SUMS])
    whole = builder.call(get_or_insert_function(builder.module, kind, "llvm.rint.v16f32"), [x])
    f = builder.fsub(x, whole)
    power = _number(POWERS_OF_LN2[terms])
    for coefficient in reversed(POWERS_OF_LN2[:terms]):
        power = multiply_add(builder, power, f, _number(coefficient))
    return whole, power


def _vector(builder, row, i, kind, size):
    """Pointer to the i-th vector of a row of numbers of that size."""
    return builder.inttoptr(builder.add(row, builder.mul(i, INT(LANES * size))), kind.as_pointer())


def _number(value):
    """The same in all lanes."""
    return ir.Constant(SUMS, [value] * LANES)


def _vectors(builder, count):
    """How many vectors hold so many numbers."""
    return builder.sdiv(builder.add(count, INT(LANES - 1)), INT(LANES))


def _wanted(builder, near, far):
    """Function (vector) -> which of its lanes lie within near ... far - 1.

    Their distance from `near`, as an unsigned number, is less than that of `far`.
    """
    near, count = (builder.trunc(x, INT32) for x in (near, builder.sub(far, near)))
    distance = builder.sub(ir.Constant(WORDS, list(range(LANES))), splat(builder, near, WORDS))
    count = splat(builder, count, WORDS)

    def wanted(i):
        first = splat(builder, builder.trunc(builder.mul(i, INT(LANES)), INT32), WORDS)
        return builder.icmp_unsigned("<", builder.add(distance, first), count)

    return wanted
