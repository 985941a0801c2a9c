"""Linear layers whose weight lies in memory the way the device reads it fastest.

At a few rows a linear layer is nothing but reading its weight, and a row-major weight is read below the speed
of memory.  So it is laid out anew once, at load.  Three ways, the first that can be had:

* tiled: our own loop on CPUs with 512-bit vectors, see `tiled_linear.py`;
* packed: the blocked layout of oneDNN, the CPU library under torch, 1.3 to 2.5 times faster than the plain way
  at 1 to 16 rows on the CPUs tried.  Its operators are the private ones that torch.compile emits for a frozen
  model;
* plain: `F.linear`, for all else (other CPUs, float64, a GPU).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.nn.functional as F

from common.model.tiled_linear import TiledLinear, can_tile
from common.pages import Pages, pages

Linear = Callable[[torch.Tensor], torch.Tensor]
"""`[T, in]` -> `[T, out]`, new memory."""

# oneDNN chooses the layout by the number of rows it is told.  That for 64 is as fast at every other number
# tried (1 to 512); only the layout for a single row is slow elsewhere.
LAYOUT_ROWS = 64
# oneDNN computes fewer rows than this more slowly than this many.
MIN_ROWS = 4


def make_linear(
    parts: Sequence[torch.Tensor], bias: torch.Tensor | None, dtype: torch.dtype, memory: Pages = pages
) -> Linear:
    """The fastest linear layer there is for this device and dtype.

    Args:
        parts: the weight `[out, in]`, of any float dtype, or several of some rows each that make one layer.  The
            plain kind may keep a single one, all else is copied.
        bias: `[out]` or None, of `dtype`.
        dtype: to compute in.
        memory: for a tiled layer's weight.
    """
    if can_tile(parts, dtype):
        return TiledLinear(parts, bias, dtype, memory)
    weight = (parts[0] if len(parts) == 1 else torch.cat(list(parts))).to(dtype)  # [out, in]
    if weight.device.type == "cpu" and can_pack(dtype):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


class PlainLinear:
    """`F.linear`: any device and dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight  # [out, in]
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, in]` -> `[T, out]`."""
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """oneDNN with the weight in its own layout; CPU, float32 or bfloat16."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, LAYOUT_ROWS)  # [out, in], opaque
        self.linear = torch.ops.mkldnn._linear_pointwise.default
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, in]` -> `[T, out]`."""
        rows = x.shape[0]
        if rows == 0:
            return x.new_empty(0, self.packed.shape[0])
        if more := -rows % row_step(rows):
            x = F.pad(x, (0, 0, 0, more))  # [T + more, in]
        return self.linear(x, self.packed, self.bias, "none", [], "")[:rows]  # [T, out]


def row_step(rows: int) -> int:
    """Rows are made up to a multiple of this, which adds an eighth at most beyond 32.

    oneDNN makes code for every number of rows that it meets and keeps it, 0.1 to 0.3 MiB for each layer's shape: a
    server that met them all would grow by hundreds of MiB.
    """
    return max(MIN_ROWS, 1 << max(0, rows.bit_length() - 4))


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch and this CPU have the packed layer for a dtype, found out by using it once."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    weight = torch.eye(8, 16, dtype=dtype)
    try:
        out = PackedLinear(weight)(weight)
    except (RuntimeError, AttributeError, TypeError):  # absent in this build, or with other arguments
        return False
    return torch.equal(out, torch.eye(8, dtype=dtype))
