"""The small steps between two linear layers, each as one pass over memory, on a CPU.

Plain torch needs about ten operators for a norm, six for a rotation and three for an activation.  At a few rows
none of them has work to do, but each costs microseconds, and together they took up to a third of a decode
forward; at many rows each goes through memory again.  These are numba kernels.  Every value is rounded where the
torch version in `layers.py` and `rope.py` rounds it; those stay the definition, and serve all else (GPUs, float64).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numba import float32, int32, prange

from common.compiled import LIKE, array_at, compiled, launch, narrow, share_threads, widen

Kernel = Callable[..., None]

DTYPES = (torch.float32, torch.bfloat16)
# Up to so many results one thread is done about as soon as all of them have started.
FEW_RESULTS = 1 << 15

LOG2_E = np.float32(math.log2(math.e))
POWERS_OF_LN2 = tuple(np.float32(math.log(2) ** k / math.factorial(k)) for k in range(8))
"""Taylor coefficients of 2 ** f; with |f| <= 1/2 the error is below 1e-8."""


def serves(x: torch.Tensor) -> bool:
    """Whether these kernels can do `[T, ...]`; if so, they do it faster than torch."""
    return x.is_cpu and x.shape[0] > 0 and x.dtype in DTYPES


def add_rms_norm(
    hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """As `layers.add_rms_norm`, for contiguous `[T, H]` in float32 or bfloat16 on the CPU."""
    out = torch.empty_like(hidden)  # [T, H]
    added = 0 if delta is None else _address(delta)
    arguments = _address(hidden), added, _address(weight), _address(out), *hidden.shape, eps
    _run(_norm_few, _norm_many, out, arguments)
    return out


def rotate(packed: torch.Tensor, num_heads: int, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """As `rope.rotate`, for contiguous `[T, >= H * D]` in float32 or bfloat16 on the CPU."""
    rows, width = packed.shape
    out = packed.new_empty(rows, num_heads, cos.shape[-1])  # [T, H, D]
    arguments = (_address(packed), _address(cos), _address(signed_sin), _address(out), width, *out.shape)
    _run(_rotate_few, _rotate_many, out, arguments)
    return out


def silu_product(gate_up: torch.Tensor) -> torch.Tensor:
    """As `layers.silu_product`, for contiguous `[T, 2 * I]` in float32 or bfloat16 on the CPU."""
    rows, width = gate_up.shape
    out = gate_up.new_empty(rows, width // 2)  # [T, I]
    _run(_silu_few, _silu_many, out, (_address(gate_up), _address(out), *out.shape))
    return out


def _run(few: Kernel, many: Kernel, out: torch.Tensor, arguments: tuple[float, ...]) -> None:
    """Call the kernel for one thread or the one for all, as suits the size of the result."""
    if out.numel() <= FEW_RESULTS:
        launch(few, LIKE[out.dtype], *arguments)
    else:
        launch(many, LIKE[out.dtype], *arguments, share_threads())


def _address(tensor: torch.Tensor) -> int:
    """Where a tensor lies.  Addresses, since making a numpy array of a tensor takes longer than the work on it."""
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {list(tensor.shape)} is strided, which these kernels cannot see")
    return tensor.data_ptr()


# A sum that may be taken in any order can be vectorised; NaN and infinity keep their meaning.
@compiled(fastmath={"reassoc"})
def _norm_rows(like, hidden_at, delta_at, weight_at, out_at, rows, width, eps, first, last):  # type: ignore[no-untyped-def]
    hidden = array_at(hidden_at, (rows, width), like)
    delta = array_at(delta_at, (rows, width), like)  # never read if delta_at is 0
    weight = array_at(weight_at, (width,), like)
    out = array_at(out_at, (rows, width), like)
    row = np.empty(width, np.float32)
    for t in range(first, last):
        if delta_at != 0:
            for i in range(width):
                hidden[t, i] = narrow(widen(hidden[t, i]) + widen(delta[t, i]), like)
        square = float32(0)
        for i in range(width):
            row[i] = widen(hidden[t, i])
            square += row[i] * row[i]
        factor = float32(1) / math.sqrt(square / float32(width) + float32(eps))
        for i in range(width):
            normed = widen(narrow(row[i] * factor, like))
            out[t, i] = narrow(normed * widen(weight[i]), like)


@compiled()
def _norm_few(like, hidden_at, delta_at, weight_at, out_at, rows, width, eps):  # type: ignore[no-untyped-def]
    _norm_rows(like, hidden_at, delta_at, weight_at, out_at, rows, width, eps, 0, rows)


@compiled(parallel=True)
def _norm_many(like, hidden_at, delta_at, weight_at, out_at, rows, width, eps, workers):  # type: ignore[no-untyped-def]
    for w in prange(workers):
        first, last = rows * w // workers, rows * (w + 1) // workers
        _norm_rows(like, hidden_at, delta_at, weight_at, out_at, rows, width, eps, first, last)


@compiled()
def _rotate_rows(like, packed_at, cos_at, sin_at, out_at, sizes, first_row, last_row):  # type: ignore[no-untyped-def]
    width, rows, heads, size = sizes
    packed = array_at(packed_at, (rows, width), like)
    cos, signed_sin = array_at(cos_at, (rows, size), like), array_at(sin_at, (rows, size), like)
    out = array_at(out_at, (rows, heads, size), like)
    half = size // 2
    for t in range(first_row, last_row):
        cosines, sines = cos[t, half:], signed_sin[t, half:]
        for h in range(heads):
            # Slices, so that every index below counts from 0 and the loop is vectorised.
            head, turned = packed[t, h * size : (h + 1) * size], out[t, h]
            first, second = head[:half], head[half:]
            new_first, new_second = turned[:half], turned[half:]
            for i in range(half):
                a, b, c, s = widen(first[i]), widen(second[i]), widen(cosines[i]), widen(sines[i])
                a_cos, b_sin = widen(narrow(a * c, like)), widen(narrow(b * s, like))
                b_cos, a_sin = widen(narrow(b * c, like)), widen(narrow(a * s, like))
                new_first[i] = narrow(a_cos - b_sin, like)
                new_second[i] = narrow(b_cos + a_sin, like)


@compiled()
def _rotate_few(like, packed_at, cos_at, sin_at, out_at, width, rows, heads, size):  # type: ignore[no-untyped-def]
    _rotate_rows(like, packed_at, cos_at, sin_at, out_at, (width, rows, heads, size), 0, rows)


@compiled(parallel=True)
def _rotate_many(like, packed_at, cos_at, sin_at, out_at, width, rows, heads, size, workers):  # type: ignore[no-untyped-def]
    for w in prange(workers):
        first, last = rows * w // workers, rows * (w + 1) // workers
        sizes = width, rows, heads, size  # made here: numba hands threads no tuple
        _rotate_rows(like, packed_at, cos_at, sin_at, out_at, sizes, first, last)


# Numpy's rules for division: a check for zero divisors would stop vectorisation.
@compiled(fastmath={"contract"}, error_model="numpy")
def _silu_rows(like, gate_up_at, out_at, rows, width, first, last):  # type: ignore[no-untyped-def]
    gate_up, out = array_at(gate_up_at, (rows, 2, width), like), array_at(out_at, (rows, width), like)
    for t in range(first, last):
        gate, up, product = gate_up[t, 0], gate_up[t, 1], out[t]
        for i in range(width):
            x = widen(gate[i])
            # e ** minus as 2 ** (exponent - 127 + f), infinite from 88.8 on; NaN passes both comparisons.
            minus = -x
            minus = float32(-87.3) if minus < float32(-87.3) else minus
            minus = float32(88.8) if minus > float32(88.8) else minus
            exponent = int32(minus * LOG2_E + float32(127.5))  # as a float32 holds it
            f = minus * LOG2_E - (float32(exponent) - float32(127))  # one instruction, so rounded once
            y = POWERS_OF_LN2[7]
            for k in (6, 5, 4, 3, 2, 1, 0):
                y = y * f + POWERS_OF_LN2[k]
            scale = np.uint32(np.uint32(exponent) << np.uint32(23)).view(np.float32)
            silu = widen(narrow(x / (float32(1) + y * scale), like))
            product[i] = narrow(silu * widen(up[i]), like)


@compiled()
def _silu_few(like, gate_up_at, out_at, rows, width):  # type: ignore[no-untyped-def]
    _silu_rows(like, gate_up_at, out_at, rows, width, 0, rows)


@compiled(parallel=True)
def _silu_many(like, gate_up_at, out_at, rows, width, workers):  # type: ignore[no-untyped-def]
    for w in prange(workers):
        _silu_rows(like, gate_up_at, out_at, rows, width, rows * w // workers, rows * (w + 1) // workers)
