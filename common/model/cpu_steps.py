"""The small steps between two linear layers, each as one pass over memory, for a few rows on a CPU.

Plain torch needs about ten operators for a norm and six for a rotation.  At a few rows none of them has work to
do, but each costs microseconds, and together they took up to a third of a decode forward.  These are numba
kernels.  Every value is rounded where the torch version in `layers.py` and `rope.py` rounds it; those stay the
definition, and serve all else (GPUs, float64, long prompts).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import float32, uint16, uint32
from numba.extending import intrinsic, overload

from common.compiled import LIKE, array_at, compiled

DTYPES = (torch.float32, torch.bfloat16)
# Above this many rows torch's operators have enough to do to be worth their cost, and use all cores.
FEW_ROWS = 256


def serves(x: torch.Tensor) -> bool:
    """Whether these kernels do better than torch on `[T, ...]`."""
    return x.is_cpu and 0 < x.shape[0] <= FEW_ROWS and x.dtype in DTYPES


def add_rms_norm(
    hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """As `layers.add_rms_norm`, for contiguous `[T, H]` in float32 or bfloat16 on the CPU."""
    out = torch.empty_like(hidden)  # [T, H]
    _add_rms_norm(
        LIKE[hidden.dtype],
        _address(hidden),
        0 if delta is None else _address(delta),
        _address(weight),
        _address(out),
        *hidden.shape,
        eps,
    )
    return out


def rotate(packed: torch.Tensor, num_heads: int, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """As `rope.rotate`, for contiguous `[T, >= H * D]` in float32 or bfloat16 on the CPU."""
    rows, width = packed.shape
    out = packed.new_empty(rows, num_heads, cos.shape[-1])  # [T, H, D]
    _rotate(
        LIKE[packed.dtype],
        _address(packed),
        _address(cos),
        _address(signed_sin),
        _address(out),
        width,
        *out.shape,
    )
    return out


def _address(tensor: torch.Tensor) -> int:
    """Where a tensor lies.  Addresses, since making a numpy array of a tensor takes longer than the work on it."""
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {list(tensor.shape)} is strided, which these kernels cannot see")
    return tensor.data_ptr()


@intrinsic
def _to_bits(typing_context, value):  # type: ignore[no-untyped-def]
    """The bits of a float32."""
    return uint32(float32), _bitcast


@intrinsic
def _from_bits(typing_context, bits):  # type: ignore[no-untyped-def]
    """The float32 of some bits."""
    return float32(uint32), _bitcast


def _bitcast(context, builder, signature, args):  # type: ignore[no-untyped-def]
    return builder.bitcast(args[0], context.get_value_type(signature.return_type))


def _wide(stored):  # type: ignore[no-untyped-def]
    """A stored number as float32; bfloat16 is the upper half of one."""


def _rounded(value, like):  # type: ignore[no-untyped-def]
    """A float32 as it is stored beside `like`: the nearest bfloat16, ties to even.

    NaN stays NaN: with bfloat16 operands the lower half of its bits is zero, so rounding cannot carry.
    """


@overload(_wide)
def _wide_for(stored):  # type: ignore[no-untyped-def]
    if stored == uint16:
        return lambda stored: _from_bits(uint32(stored) << uint32(16))
    return lambda stored: stored


@overload(_rounded)
def _rounded_for(value, like):  # type: ignore[no-untyped-def]
    def to_bfloat16(value, like):  # type: ignore[no-untyped-def]
        bits = _to_bits(value)
        return uint16((bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1))) >> uint32(16))

    return to_bfloat16 if like == uint16 else lambda value, like: value


# A sum that may be taken in any order can be vectorised; NaN and infinity keep their meaning.
@compiled(fastmath={"reassoc"})
def _add_rms_norm(like, hidden_at, delta_at, weight_at, out_at, rows, width, eps):  # type: ignore[no-untyped-def]
    hidden = array_at(hidden_at, (rows, width), like)
    delta = array_at(delta_at, (rows, width), like)  # never read if delta_at is 0
    weight = array_at(weight_at, (width,), like)
    out = array_at(out_at, (rows, width), like)
    row = np.empty(width, np.float32)
    for t in range(rows):
        if delta_at != 0:
            for i in range(width):
                hidden[t, i] = _rounded(_wide(hidden[t, i]) + _wide(delta[t, i]), like)
        square = float32(0)
        for i in range(width):
            row[i] = _wide(hidden[t, i])
            square += row[i] * row[i]
        factor = float32(1) / math.sqrt(square / float32(width) + float32(eps))
        for i in range(width):
            normed = _wide(_rounded(row[i] * factor, like))
            out[t, i] = _rounded(normed * _wide(weight[i]), like)


@compiled()
def _rotate(like, packed_at, cos_at, signed_sin_at, out_at, width, rows, heads, size):  # type: ignore[no-untyped-def]
    packed = array_at(packed_at, (rows, width), like)
    cos, signed_sin = array_at(cos_at, (rows, size), like), array_at(signed_sin_at, (rows, size), like)
    out = array_at(out_at, (rows, heads, size), like)
    half = size // 2
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
