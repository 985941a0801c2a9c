"""Linear layers on CPUs with 512-bit vectors: the weight is read once, in order, at the speed of memory.

A tile of the output, some rows by 16 columns or a few times that, is summed in registers while one pass goes
down the columns' weights.  Those lie in memory in just the order in which that pass wants them:

    weight [out, in] -> for each 16 columns: one cache line (64 bytes) per step, that is, 16 columns by
                        1 input in float32, 16 columns by 2 inputs in bfloat16

Each step multiplies that line with 4 bytes of every row of x: in float32 by a fused multiply-add, in bfloat16
by the instruction that multiplies pairs and adds in float32 (AVX512_BF16).  A row's sums are added up in one
order whatever rows stand beside it, so its result does not depend on its neighbours, not even in bfloat16.

More than 8 rows take several passes down the same columns.  The first waits for memory, the others find the
weight in a cache and wait for the multipliers; so each asks ahead for some of the next columns' weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numba
import torch
from llvmlite import binding, ir
from numba import prange, types
from numba.extending import intrinsic

from common.compiled import (
    LANES,
    LIKE,
    LINE,
    SUMS,
    WORD,
    WORDS,
    add_products,
    compiled,
    launch,
    place,
    prefetch,
    repeat,
    share_threads,
    splat,
    to_bfloat16,
)
from common.pages import Pages, pages

LINES_AHEAD = 2  # that a step asks for: the columns' weight (up to 3 a step) is there after two passes

INT = ir.IntType(64)

# Rows of a weight that are cast at a time, so that no whole copy of it is ever there.
SLAB = 64 * LANES

# Rows and vectors of columns that a tile can have: as many sums as leave some of the 32 registers for operands.
# Few rows are bound by memory, which one vector reads in one stream.
SHAPES = [(high, wide) for high in range(1, 9) for wide in (1, 2, 3) if high > 4 or wide == 1]


class TiledLinear:
    """One linear layer; see `can_tile` for which."""

    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        memory: Pages = pages,
    ) -> None:
        self.packed = pack(parts, dtype, memory)  # [out / 16, steps, 16, inputs per step]
        self.out = LANES * self.packed.shape[0]
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, in]` -> `[T, out]`."""
        rows = x.shape[0]
        out = x.new_empty(rows, self.out)  # [T, out]
        if rows:
            x = x.contiguous()
            share_threads()
            launch(_multiply, LIKE[x.dtype], self.packed.data_ptr(), x.data_ptr(), out.data_ptr(), rows,
                   self.out * x.element_size(), self.packed.shape[1],
                   *tiles(rows, self.out // LANES))  # fmt: skip
        return out if self.bias is None else out.add_(self.bias)


def pack(parts: Sequence[torch.Tensor], dtype: torch.dtype, memory: Pages) -> torch.Tensor:
    """`[out, in]` in parts, each of some rows -> `[out / 16, steps, 16, inputs per step]`.

    What lies there for good and what for a moment have pages of their own: on the heap the holes of the one would
    be cut up by the other, and loading would keep half as much again as the weights.
    """
    if any(part.shape[0] % LANES for part in parts):
        parts = [torch.cat(list(parts))]
    out, width = sum(part.shape[0] for part in parts), parts[0].shape[1]
    each = WORD // dtype.itemsize
    packed = memory(out // LANES, width // each, LANES, each, dtype=dtype)
    words = packed.view(torch.int32)[..., 0].numpy()  # [out / 16, steps, 16]
    cast = pages(SLAB, width, dtype=dtype)
    share_threads()
    first = 0
    for slab in (slab for part in parts for slab in part.split(SLAB)):
        rows = slab.shape[0]
        _pack(cast[:rows].copy_(slab).view(torch.int32).numpy(), words[first : first + rows // LANES])
        first += rows // LANES
    return packed


@cache
def tiles(rows: int, vectors: int) -> tuple[int, int, int]:
    """Height and width of the tiles for so many rows and vectors of columns, and how many stand side by side.

    The last tile of a column may do rows again that another has done.  A tile costs its rows and about two
    more, for loading the weight.
    """
    high = min(range(1, min(rows, 8) + 1), key=lambda h: (-(-rows // h) * (h + 2), -h))
    wide = max(w for h, w in SHAPES if h == high and vectors % w == 0)
    return high, wide, vectors // wide


def can_tile(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> bool:
    """Whether this layer can be done here in `dtype`, and is done best here."""
    out, width = sum(part.shape[0] for part in parts), parts[0].shape[1]
    whole = out % LANES == 0 and width * dtype.itemsize % WORD == 0
    return parts[0].device.type == "cpu" and dtype in instructions() and whole


@cache
def instructions() -> frozenset[torch.dtype]:
    """The dtypes for which this processor has the vectors and no better way, each tried once.

    With AMX, oneDNN is at the speed of memory in bfloat16, and at many rows beyond our reach.
    """
    has = binding.get_host_cpu_features()
    fits = {
        torch.float32: has.get("avx512f"),
        torch.bfloat16: has.get("avx512bf16") and not has.get("amx-bf16"),
    }
    return frozenset(dtype for dtype, fit in fits.items() if fit and _works(dtype))


def _works(dtype: torch.dtype) -> bool:
    """Whether numba's LLVM makes the code: names of instructions change between its versions."""
    x = torch.eye(8, 32, dtype=dtype)
    weight = torch.arange(16 * 32).view(16, 32).to(dtype)
    try:
        return torch.equal(TiledLinear([weight], None, dtype)(x), weight[:, :8].T)
    except (RuntimeError, numba.core.errors.NumbaError):
        return False


@compiled(parallel=True)
def _pack(words, packed):  # type: ignore[no-untyped-def]
    """Lay `[out, steps]` out as `[out / 16, steps, 16]`; torch's own copy takes ten times as long."""
    for vector in prange(len(packed)):
        for step in range(packed.shape[1]):
            for lane in range(LANES):
                packed[vector, step, lane] = words[vector * LANES + lane, step]


@intrinsic
def _tile(_, like, high, wide, weight, steps, x, out, out_row, ahead):  # type: ignore[no-untyped-def]
    """Sum one tile and store it: `high` rows of x by `wide` vectors of columns, one of SHAPES.

    Args:
        like: of the elements' type.
        high: rows.
        wide: vectors of columns.
        weight: address of the columns' first line; one vector's lines follow another's.
        steps: lines of a vector.
        x: address of the first row; the next begins behind its last word.
        out: address of the first sum.
        out_row: bytes from one row of it to the next.
        ahead: address of the weight that will be wanted soon; nothing need be there.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        _, high, wide, *operands = arguments
        done = builder.append_basic_block()
        switch = builder.switch(builder.add(builder.mul(high, INT(8)), wide), done)
        for rows, columns in SHAPES:
            block = builder.append_basic_block()
            switch.add_case(INT(8 * rows + columns), block)
            builder.position_at_end(block)
            _emit_tile(builder, like, rows, columns, *operands)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(like, high, wide, weight, steps, x, out, out_row, ahead), generate


def _emit_tile(builder, like, rows, columns, weight, steps, x, out, out_row, ahead):  # type: ignore[no-untyped-def]
    """Emit the code of one shape; the sums stay in registers from the first step to the last."""
    sums = [ir.Constant(SUMS, [0.0] * LANES)] * (rows * columns)
    vector_bytes, row_bytes = (builder.mul(steps, INT(size)) for size in (LINE, WORD))
    stored_bytes = INT(LANES * like.bitwidth // 8)

    def step(i, sums):  # type: ignore[no-untyped-def]
        asked = builder.add(ahead, builder.mul(i, INT(LINES_AHEAD * LINE)))
        for n in range(LINES_AHEAD):
            prefetch(builder, place(builder, asked, n, INT(LINE), ir.IntType(8)))
        line = builder.add(weight, builder.mul(i, INT(LINE)))
        lines = [
            builder.load(place(builder, line, c, vector_bytes, WORDS), align=LINE) for c in range(columns)
        ]
        words_at = builder.add(x, builder.mul(i, INT(WORD)))
        following = []
        for r in range(rows):
            word = builder.load(place(builder, words_at, r, row_bytes, ir.IntType(32)), align=2)
            words = splat(builder, word, WORDS)
            for line, total in zip(lines, sums[r * columns :], strict=False):
                following.append(add_products(builder, like, total, words, line))
        return following

    sums = repeat(builder, steps, sums, step)
    for r in range(rows):
        row = builder.add(out, builder.mul(INT(r), out_row))
        for c, total in enumerate(sums[r * columns : (r + 1) * columns]):
            stored = to_bfloat16(builder, total) if like == types.uint16 else total
            builder.store(stored, place(builder, row, c, stored_bytes, stored.type), align=like.bitwidth // 8)


@compiled(parallel=True)
def _multiply(like, weight, x, out, rows, out_row, steps, high, wide, across):  # type: ignore[no-untyped-def]
    """All tiles; arguments as in `TiledLinear.__call__`."""
    tile_bytes = out_row // across
    for tile in prange(across):
        columns = weight + tile * wide * steps * LINE
        following = columns + wide * steps * LINE
        for i in range((rows + high - 1) // high):
            asked = LINES_AHEAD * i
            ahead = following + asked * steps * LINE if asked < wide else columns
            first = min(i * high, rows - high)
            out_at = out + first * out_row + tile * tile_bytes
            _tile(like, high, wide, columns, steps, x + first * steps * WORD, out_at, out_row, ahead)
