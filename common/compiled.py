"""What all numba code here is made with: the decorator, tensors as addresses, and pieces of vector code."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic, overload

LIKE = {
    torch.bfloat16: np.uint16(0),
    torch.float16: np.int16(0),
    torch.float32: np.float32(0),
    torch.float64: np.float64(0),
}
"""A number of the type that the compiled code is to see.  Numba knows no 16-bit floats: `uint16` stands for
bfloat16, which is the upper half of a float32's bits, and `int16` for float16."""


LINE = 64  # bytes of a cache line and of a 512-bit vector
LANES = 16  # float32 numbers in such a vector
WORD = 4  # bytes of each: one float32, or two bfloat16
SUMS, WORDS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(32), LANES)


def compiled(*built_from: ModuleType, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile at the first call (seconds), kept on disk where there is somewhere to write.

    Numba's cache on disk notices changes of a function's own file alone.  So a fingerprint of all else that the code
    is built from becomes part of the name that it is kept under.

    Compiled functions have no arguments with defaults: numba takes two of one type for the same, and once there are
    two it looks for the right code in Python, 20 to 80 us at every call.

    Args:
        built_from: modules whose functions are compiled into this one; of this file it is known.
        options: of `njit`.
    """
    files = __file__, *(str(module.__file__) for module in built_from)
    fingerprint = zlib.crc32(b"".join(Path(file).read_bytes() for file in files))

    def decorate(function: Callable[..., Any]) -> Any:
        function.__qualname__ += f"_{fingerprint:08x}"
        try:
            return njit(function, cache=True, **options)
        except RuntimeError:  # numba found no folder for its cache: compile in each process
            return njit(function, **options)

    return decorate


Listener = Callable[[Callable[..., Any], tuple[Any, ...]], None]
"""Is told of a compiled function and what it is called with."""

LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)
"""Who wants to know of the launches of this thread: see `host_graphs.py`."""


def launch(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a compiled function, and tell whoever listens.

    Args:
        function: computes nothing but from what it is given.  It returns nothing, or the number of what is wrong in
            its arguments, -1 if all is right.
        arguments: numbers, addresses and tuples of them.
    """
    listener = LISTENER.get()
    if listener is not None:
        listener(function, arguments)
    return function(*arguments)


def share_threads() -> int:
    """Let numba use as many threads as torch; where both load one OpenMP library, as on Linux, the same ones."""
    num_threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    numba.set_num_threads(num_threads)
    return num_threads


@intrinsic
def _pointer(_: Any, address: Any, like: Any) -> Any:
    """A pointer to numbers of the type of `like`."""
    pointer = types.CPointer(like)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(pointer))

    return pointer(types.int64, like), generate


@njit
def array_at(address, shape, like):  # type: ignore[no-untyped-def]
    """The array that lies there: handing over a tensor's address takes 0.1 us, making a numpy array of it 2."""
    return carray(_pointer(address, like), shape)


def repeat(
    builder: ir.IRBuilder, count: ir.Value, values: Seq[ir.Value], step: Callable[..., Any]
) -> list[Any]:
    """Emit `for i in range(count): values = step(i, values)`; return the last values."""
    before = builder.block
    head, body, after = (builder.append_basic_block() for _ in range(3))
    builder.branch(head)
    builder.position_at_end(head)
    i = builder.phi(count.type)
    now = [builder.phi(value.type) for value in values]
    builder.cbranch(builder.icmp_signed("<", i, count), body, after)
    builder.position_at_end(body)
    following = [builder.add(i, count.type(1)), *step(i, now)]
    for phi, start, other in zip([i, *now], [count.type(0), *values], following, strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(other, body)
    builder.branch(head)
    builder.position_at_end(after)
    return now


def splat(builder: ir.IRBuilder, scalar: ir.Value, vector: ir.VectorType) -> ir.Value:
    """The same number in all lanes."""
    word, nothing = ir.IntType(32), ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(nothing, scalar, word(0))
    lanes = ir.Constant(ir.VectorType(word, vector.count), [0] * vector.count)
    return builder.shuffle_vector(first, nothing, lanes)


def multiply_add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """Product and sum, as one instruction where the machine has it."""
    return builder.fadd(builder.fmul(a, b, flags=["contract"]), c, flags=["contract"])


def add_products(
    builder: ir.IRBuilder, like: types.Type, sums: ir.Value, a: ir.Value, b: ir.Value
) -> ir.Value:
    """SUMS + a * b in each lane of WORDS; of bfloat16, sums + a[0] * b[0] + a[1] * b[1]."""
    if like == types.uint16:
        name, kind = "llvm.x86.avx512bf16.dpbf16ps.512", ir.FunctionType(SUMS, [SUMS, WORDS, WORDS])
        return builder.call(get_or_insert_function(builder.module, kind, name), [sums, a, b])
    return multiply_add(builder, builder.bitcast(a, SUMS), builder.bitcast(b, SUMS), sums)


def place(builder: ir.IRBuilder, base: ir.Value, n: int, size: ir.Value, kind: ir.Type) -> ir.Value:
    """A pointer to `kind` at the address base + n * size."""
    offset = builder.mul(ir.IntType(64)(n), size)
    return builder.inttoptr(builder.add(base, offset), kind.as_pointer())


def prefetch(builder: ir.IRBuilder, pointer: ir.Value) -> None:
    """Ask for memory into the second-level cache: the first has too few places for misses (19, not 27 GB/s)."""
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    function = get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, second_level, data = word(0), word(2), word(1)
    builder.call(function, [builder.bitcast(pointer, byte), read, second_level, data])


class _BFloat(ir.Type):
    """LLVM has the type, llvmlite no name for it."""

    def _to_string(self) -> str:
        return "bfloat"

    __str__ = _to_string


def to_bfloat16(builder: ir.IRBuilder, sums: ir.Value) -> ir.Value:
    """SUMS as the bits of the nearest bfloat16 in each lane, ties to even; NaN stays NaN."""
    halves = builder.fptrunc(sums, ir.VectorType(_BFloat(), LANES))
    return builder.bitcast(halves, ir.VectorType(ir.IntType(16), LANES))


def widen(x):  # type: ignore[no-untyped-def]
    """A stored number, see `LIKE`, as one to calculate with."""
    raise NotImplementedError("compiled code only")


@overload(widen)
def _widen(x):  # type: ignore[no-untyped-def]
    return {
        types.uint16: lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32),
        types.int16: lambda x: _half_to_float(x),  # noqa: PLW0108 - numba overloads take functions
    }.get(x, lambda x: x)


def narrow(x, like):  # type: ignore[no-untyped-def]
    """A result as it is stored beside `like`: the nearest, ties to even."""
    raise NotImplementedError("compiled code only")


@overload(narrow)
def _narrow(x, like):  # type: ignore[no-untyped-def]
    def bfloat16(x, like):  # type: ignore[no-untyped-def]
        # NaN stays NaN: made here or of bfloat16 numbers, the lower half of its bits is zero, so nothing carries.
        bits = np.float32(x).view(np.uint32)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))

    return {
        types.uint16: bfloat16,
        types.int16: lambda x, like: _float_to_half(x),
    }.get(like, lambda x, like: x)


@intrinsic
def _half_to_float(_, x):  # type: ignore[no-untyped-def]
    """The number whose float16 bits these are."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        half = builder.bitcast(arguments[0], ir.HalfType())
        return builder.fpext(half, ir.FloatType())

    return types.float32(types.int16), generate


@intrinsic
def _float_to_half(_, x):  # type: ignore[no-untyped-def]
    """Bits of the nearest float16."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        half = builder.fptrunc(arguments[0], ir.HalfType())
        return builder.bitcast(half, ir.IntType(16))

    return types.int16(types.float32), generate
