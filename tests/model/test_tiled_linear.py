"""The tiled linear layer against float64, row counts and widths around the edges of its tiles."""

from __future__ import annotations

import pytest
import torch

from common.model import tiled_linear
from common.model.linear import PlainLinear, make_linear
from common.model.tiled_linear import TiledLinear, can_tile, instructions, tiles

DTYPES = [torch.float32, torch.bfloat16]


def need(dtype: torch.dtype) -> None:
    """Skip where the processor has no such vectors, or a better way."""
    if dtype not in instructions():
        pytest.skip(f"tiles of {dtype} are not for this processor")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out", [16, 32, 48, 80, 96])  # one, two and three vectors side by side
def test_any_number_of_rows(dtype, out):
    """From none to several tiles with a rest, with and without bias."""
    need(dtype)
    weight, bias = torch.randn(out, 36, dtype=dtype), torch.randn(out, dtype=dtype)
    plain, biased = TiledLinear([weight], None, dtype), TiledLinear([weight], bias, dtype)
    for rows in [*range(27), 64, 130]:
        x = torch.randn(rows, 36, dtype=dtype)
        exact = x.double() @ weight.double().T  # [rows, out]
        tolerance = 60 * torch.finfo(dtype).eps
        assert plain(x).shape == (rows, out)
        assert torch.allclose(plain(x).double(), exact, atol=tolerance)
        assert torch.allclose(biased(x).double(), exact + bias.double(), atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_neighbours(dtype):
    """Bit for bit, at every height of a tile: what an engine promises of its answers."""
    need(dtype)
    layer, x = TiledLinear([torch.randn(96, 64)], None, dtype), torch.randn(40, 64, dtype=dtype)
    alone = torch.cat([layer(row) for row in x.split(1)])
    for rows in range(1, 41):
        assert torch.equal(layer(x[:rows]), alone[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_be_strided(dtype):
    """As the slices of a fused projection are."""
    need(dtype)
    layer, wide = TiledLinear([torch.randn(48, 24)], None, dtype), torch.randn(5, 48, dtype=dtype)
    assert torch.equal(layer(wide[:, ::2]), layer(wide[:, ::2].contiguous()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_rounded_to_the_nearest_and_nothing_is_hidden(dtype):
    """Ties to even as torch does it, infinity and NaN stay; a broken row stays alone."""
    need(dtype)
    weight = torch.eye(16, 32, dtype=dtype)
    weight[0, 1] = weight[1, 2] = 1.0  # column 0 sums two inputs, column 1 inputs 1 and 2
    x = torch.zeros(4, 32, dtype=dtype)
    x[0, 0], x[0, 1], x[0, 2] = 1.0, 2.0**-8, 2.0**-9  # in bfloat16 1 + 2 ** -8 lies half way, and goes down
    x[1, 0], x[2, 0], x[3, 0] = torch.inf, -torch.inf, torch.nan
    got = TiledLinear([weight], None, dtype)(x)
    assert torch.equal(
        got[0, 0].double(), torch.tensor(1.0 + 2.0**-8, dtype=torch.float64).to(dtype).double()
    )
    assert got[1, 0] == torch.inf
    assert got[2, 0] == -torch.inf
    assert got[3, 0].isnan()
    assert got[0].isfinite().all()


def test_tiles_cover_every_row_and_column():
    """The shapes that are chosen exist in the compiled code, which does nothing for others."""
    for rows in range(1, 300):
        for vectors in (1, 2, 3, 4, 5, 6, 60):
            high, wide, across = tiles(rows, vectors)
            assert (high, wide) in tiled_linear.SHAPES
            assert high <= rows
            assert across * wide == vectors


def test_a_weight_is_cast_slab_by_slab(monkeypatch):
    """The same layer from a stored bfloat16 or float32 weight, whole or in parts, over several slabs and a rest."""
    need(torch.float32)
    monkeypatch.setattr(tiled_linear, "SLAB", 32)
    stored, x = torch.randn(80, 24, dtype=torch.bfloat16), torch.randn(3, 24)
    wide = TiledLinear([stored.float()], None, torch.float32)
    for parts in ([stored], stored.split([16, 64]), stored.split([40, 10, 30])):
        assert torch.equal(TiledLinear(parts, None, torch.float32)(x), wide(x))
    assert torch.allclose(wide(x), x @ stored.float().T, atol=1e-5)


def test_what_cannot_be_tiled_is_left_to_others():
    """Odd widths, few columns, float64."""
    for shape, dtype in [((20, 32), torch.float32), ((16, 7), torch.bfloat16), ((16, 32), torch.float64)]:
        assert not can_tile([torch.randn(shape)], dtype)
    assert isinstance(make_linear([torch.randn(16, 32)], None, torch.float64), PlainLinear)


@pytest.mark.parametrize(
    ("features", "dtypes"),
    [
        (set(), set()),
        ({"avx512f"}, {torch.float32}),
        ({"avx512f", "avx512bf16"}, {torch.float32, torch.bfloat16}),
        ({"avx512f", "avx512bf16", "amx-bf16"}, {torch.float32}),
    ],
)
def test_which_dtypes_a_processor_has_vectors_for(monkeypatch, features, dtypes):
    """Other processors, and those whose matrix units do better, are left to oneDNN."""
    monkeypatch.setattr(tiled_linear.binding, "get_host_cpu_features", lambda: dict.fromkeys(features, True))
    monkeypatch.setattr(tiled_linear, "_works", lambda dtype: True)
    assert instructions.__wrapped__() == dtypes


def test_a_compiler_that_cannot_is_no_failure(monkeypatch):
    """Then the layer is made another way."""

    def broken(*_: object) -> None:
        raise RuntimeError("LLVM does not know this instruction")

    monkeypatch.setattr(tiled_linear, "_multiply", broken)
    assert not tiled_linear._works(torch.float32)
