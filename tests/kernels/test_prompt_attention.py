"""Attention of long queries in tiles, where the processor can: against dense attention, and against torch's way."""

from __future__ import annotations

import pytest
import torch
from paged_cases import Case, KernelUnderTest, Paged
from processors import another_processor
from support.interpreter import INTERPRETED

from stage3_paged.kernels import cpu, cpu_prompt
from stage3_paged.kernels.cpu_layout import numbers_per_word

pytestmark = pytest.mark.skipif(INTERPRETED, reason="this session is for Triton's interpreter")

CPU = KernelUnderTest("cpu", cpu, "cpu")
DTYPES = (torch.float32, torch.bfloat16)
LONG = ((300, 300), (70, 700), (17, 513), (1, 40), (256, 512))
"""Whole prompts and chunks on both sides of a key block's edge (512), and a decode that goes another way."""


@pytest.mark.parametrize("window", [None, 1, 100, 188, 400])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_contexts_of_several_key_blocks(dtype: torch.dtype, window: int | None) -> None:
    """Windows that begin within a key block, at its edge and in the one before; free slots hold NaN."""
    paged = Paged(CPU, Case(LONG, window=window, dtype=dtype))
    paged.check(paged.attend())


SHAPES = (
    ((2, 2), 16, 16, torch.bfloat16),
    ((8, 1), 48, 32, torch.bfloat16),
    ((64, 1), 64, 512, torch.bfloat16),
    ((7, 7), 128, 16, torch.bfloat16),
    ((8, 1), 64, 8, torch.bfloat16),
    ((2, 2), 128, 256, torch.float32),
    ((8, 1), 96, 32, torch.float32),
    ((8, 1), 96, 1, torch.float32),
)
"""Groups that fill a unit unevenly or beyond it, heads of 1, 3, 4, 6 and 8 vectors, blocks small and large.

Blocks that are not made of 16 tokens each are plain; there torch takes over.
"""


@pytest.mark.parametrize(("heads", "head_size", "block_size", "dtype"), SHAPES, ids=str)
def test_shapes(heads: tuple[int, int], head_size: int, block_size: int, dtype: torch.dtype) -> None:
    """Each alone agrees with dense attention."""
    paged = Paged(CPU, Case(((45, 83),), block_size, head_size, heads, None, dtype))
    paged.check(paged.attend())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_where_the_vectors_are_missing(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways are right, and which one is used shows in the last digits."""
    own = Paged(CPU, Case(LONG, dtype=dtype)).attend()
    possible = numbers_per_word(dtype, 16, 64) > 0
    with another_processor(monkeypatch):
        paged = Paged(CPU, Case(LONG, dtype=dtype))
        theirs = paged.attend()
    paged.check(theirs)
    assert torch.equal(own, theirs) is not possible


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_neighbour_changes_no_bit(dtype: torch.dtype) -> None:
    """A prompt's result is the same alone and in a batch."""
    paged = Paged(CPU, Case(LONG, dtype=dtype))
    together = paged.attend()
    alone = torch.empty(300, 9, 64, dtype=dtype)
    keys, values = paged.caches[0].permute(0, 2, 3, 1), paged.caches[1].permute(0, 2, 1, 3)
    rows = [(paged.tables[0], 0, 300, 300)]
    cpu_prompt.attend_long_queries(
        paged.q[:300], keys, values, rows, paged.case.head_size**-0.5, None, alone, None
    )
    assert torch.equal(alone, together[:300])


def test_host_copies_that_name_a_long_query_where_there_is_none() -> None:
    """What is computed follows the lengths on the device, as it says; the lists only save reading those."""
    paged = Paged(CPU, Case(((9, 9), (9, 20))))
    paged.check(paged.attend(query_lens=[17, 1]))
