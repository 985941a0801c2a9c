"""The small steps between two linear layers, each as one pass over memory: numba kernels for a few rows on a CPU.

Plain torch needs about ten operators for a norm and six for a rotation.  At a few rows none of them has work
to do, but each costs microseconds: together they took a third of a decode forward.  Every value is rounded where
the torch version in `layers.py` and `rope.py` rounds it; those stay the definition, and serve all else (GPUs,
float64, long prompts).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import float32, njit, uint16, uint32
from numba.extending import intrinsic, overload


def add_rms_norm(
    hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """As `layers.add_rms_norm`, for contiguous `[T, H]` in float32 or bfloat16 on the CPU."""
    out = torch.empty_like(hidden)  # [T, H]
    rows = _array(hidden)
    _add_rms_norm(
        rows, rows if delta is None else _array(delta), delta is not None, _array(weight), eps, _array(out)
    )
    return out


def rotate(packed: torch.Tensor, num_heads: int, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """As `rope.rotate`, for contiguous `[T, >= H * D]` in float32 or bfloat16 on the CPU."""
    rows, head_dim = packed.shape[0], cos.shape[-1]
    out = packed.new_empty(rows, num_heads, head_dim)  # [T, H, D]
    tables = cos.view(rows, head_dim), signed_sin.view(rows, head_dim)  # [T, D]
    _rotate(_array(packed), *map(_array, tables), _array(out))
    return out


def _array(tensor: torch.Tensor) -> np.ndarray:
    """The same memory for numba, which knows no bfloat16: its bits as uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _compile(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile at the first call (about a second), kept on disk where there is somewhere to write."""

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return njit(function, cache=True, **options)
        except RuntimeError:  # numba found no folder for its cache: compile in each process
            return njit(function, **options)

    return decorate


@intrinsic
def _to_bits(typing_context, value):  # type: ignore[no-untyped-def]
    """The bits of a float32."""
    return uint32(float32), lambda context, builder, sig, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic
def _from_bits(typing_context, bits):  # type: ignore[no-untyped-def]
    """The float32 of some bits."""
    return float32(uint32), lambda context, builder, sig, args: builder.bitcast(args[0], ir.FloatType())


def _wide(stored):  # type: ignore[no-untyped-def]
    """A stored number as float32; bfloat16 is the upper half of one."""


def _rounded(value, like):  # type: ignore[no-untyped-def]
    """A float32 as it is stored beside `like`: to the nearest bfloat16, ties to even, NaN stays NaN."""


@overload(_wide)
def _wide_for(stored):  # type: ignore[no-untyped-def]
    if stored == uint16:
        return lambda stored: _from_bits(uint32(stored) << uint32(16))
    return lambda stored: stored


@overload(_rounded)
def _rounded_for(value, like):  # type: ignore[no-untyped-def]
    def to_bfloat16(value, like):  # type: ignore[no-untyped-def]
        bits = _to_bits(value)
        nearest = (bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1))) >> uint32(16)
        return uint16(nearest) if value == value else uint16(0x7FC0)  # noqa: PLR0124  NaN is not itself

    return to_bfloat16 if like == uint16 else lambda value, like: value


# A sum that may be taken in any order can be vectorised; NaN and infinity keep their meaning.
@_compile(fastmath={"reassoc"})
def _add_rms_norm(hidden, delta, adds, weight, eps, out):  # type: ignore[no-untyped-def]
    rows, width = hidden.shape
    like = hidden.dtype.type(0)
    row = np.empty(width, np.float32)
    for t in range(rows):
        square = float32(0)
        for i in range(width):
            if adds:
                hidden[t, i] = _rounded(_wide(hidden[t, i]) + _wide(delta[t, i]), like)
            row[i] = _wide(hidden[t, i])
        for i in range(width):
            square += row[i] * row[i]
        factor = float32(1) / math.sqrt(square / float32(width) + float32(eps))
        for i in range(width):
            normed = _wide(_rounded(row[i] * factor, like))
            out[t, i] = _rounded(normed * _wide(weight[i]), like)


@_compile()
def _rotate(packed, cos, signed_sin, out):  # type: ignore[no-untyped-def]
    rows, heads, size = out.shape
    half = size // 2
    like = packed.dtype.type(0)
    for t in range(rows):
        cosines, sines = cos[t, half:], signed_sin[t, half:]
        for h in range(heads):
            # Slices, so that every index below counts from 0 and the loop is vectorised.
            head, turned = packed[t, h * size : (h + 1) * size], out[t, h]
            first, second = head[:half], head[half:]
            new_first, new_second = turned[:half], turned[half:]
            for i in range(half):
                a, b, c, s = _wide(first[i]), _wide(second[i]), _wide(cosines[i]), _wide(sines[i])
                a_cos, b_sin = _wide(_rounded(a * c, like)), _wide(_rounded(b * s, like))
                b_cos, a_sin = _wide(_rounded(b * c, like)), _wide(_rounded(a * s, like))
                new_first[i] = _rounded(a_cos - b_sin, like)
                new_second[i] = _rounded(b_cos + a_sin, like)
