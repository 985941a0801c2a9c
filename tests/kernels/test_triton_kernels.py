"""What only the Triton kernels have: splits, the simple version, rows that stand for no token, limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paged_cases import DTYPES, GROUPS, Case, KernelUnderTest, Paged, batches

from common.errors import InvalidValue

MIXED = Case(batches(8)["mixed"], block_size=8)


@pytest.mark.parametrize(("num_splits", "window"), [(2, None), (4, 100), (16, None)])
def test_splits_are_merged(triton_kernel: KernelUnderTest, num_splits: int, window: int | None) -> None:
    """KNOWN_FAULTS B61: most splits are empty for the short ones, and nothing becomes NaN."""
    paged = Paged(triton_kernel, Case(((1, 1), (1, 3), (1, 300), (3, 130)), 16, 32, (3, 1), window))
    lse = torch.full(paged.q.shape[:2], float("nan"), device=paged.device)
    paged.check(paged.attend(num_splits=num_splits, lse=lse), lse)


def test_window_shorter_than_a_tile_s_step(triton_kernel: KernelUnderTest) -> None:
    """KNOWN_FAULTS B61: the last rows of a large tile see nothing in its first step, and stay finite."""
    case = Case(((100, 130),), heads=(2, 2), head_size=32, window=5, dtype=torch.float16)
    paged = Paged(triton_kernel, case)
    paged.check(paged.attend())


def test_one_position_in_many_splits(triton_kernel: KernelUnderTest) -> None:
    """KNOWN_FAULTS B61: context 1 over four splits returns exactly V."""
    paged = Paged(triton_kernel, Case(((1, 1),), heads=(6, 2)))
    out = paged.attend(num_splits=4)
    assert torch.equal(out[0], paged.v[0][0].repeat_interleave(3, dim=0))  # [Hq, D]


def test_long_contexts_are_split_by_themselves(triton_kernel: KernelUnderTest) -> None:
    """One long sequence gets the programs of a whole GPU, many sequences or a short context get one each."""
    choose = triton_kernel.module.choose_splits
    assert choose(num_programs=8, max_context=32768) == 32
    assert choose(num_programs=8, max_context=1024) == 4  # not shorter than 256 positions
    assert choose(num_programs=128, max_context=32768) == 2
    assert choose(num_programs=512, max_context=32768) == 1
    assert choose(num_programs=8, max_context=256) == 1


@pytest.mark.parametrize(("heads", "dtype"), zip(GROUPS, [*DTYPES, torch.float32], strict=True), ids=str)
def test_simple_kernel(triton_kernel: KernelUnderTest, heads: tuple[int, int], dtype: torch.dtype) -> None:
    """The version of the chapter gives the same, with and without a window."""
    paged = Paged(triton_kernel, Case(((1, 19), (3, 10), (9, 9), (1, 1)), 8, 80, heads, dtype=dtype))
    paged.kernel = _Simple(triton_kernel)
    for window in (None, 5):
        paged.case = replace(paged.case, window=window)
        paged.check(paged.attend(window=window))


class _Simple:
    """A kernel module whose attention is the simple one."""

    def __init__(self, tested: KernelUnderTest) -> None:
        self.paged_attention = tested.module.paged_attention_simple


def test_rows_without_a_token(triton_kernel: KernelUnderTest) -> None:
    """What fills up a captured batch (slot -1, context 0) stores nothing, and its output is zero."""
    paged = Paged(triton_kernel, Case(((1, 20), (1, 1))))
    before = [cache.clone() for cache in paged.caches]
    nowhere = torch.full((2,), -1, dtype=torch.int64, device=paged.device)
    row = torch.ones(2, 3, 64, device=paged.device)
    paged.kernel.store_kv(row, row, *paged.caches, nowhere)
    for cache, old in zip(paged.caches, before, strict=True):
        assert torch.equal(cache.view(torch.int32), old.view(torch.int32))  # NaN too
    paged.seq_lens[1] = 0
    for num_splits in (1, 4):
        lse = torch.zeros(2, 9, device=paged.device)
        out = paged.attend(num_splits=num_splits, lse=lse)
        assert (out[1] == 0).all()
        assert (lse[1] == -float("inf")).all()
        assert out[0].isfinite().all()
        assert lse[0].isfinite().all()


@pytest.mark.parametrize("heads", [(40, 1), (5, 1)], ids=str)
@pytest.mark.parametrize("head_size", [8, 24])
def test_odd_shapes(triton_kernel: KernelUnderTest, heads: tuple[int, int], head_size: int) -> None:
    """Heads smaller than the matrix units take, groups larger than the small tile."""
    paged = Paged(triton_kernel, replace(MIXED, heads=heads, head_size=head_size, dtype=torch.float16))
    paged.check(paged.attend())


def test_limits_are_named(triton_kernel: KernelUnderTest) -> None:
    """Head sizes that the launch table does not know are refused."""
    with pytest.raises(InvalidValue, match="head_size: got 512, allowed: at most 256"):
        Paged(triton_kernel, replace(MIXED, head_size=512)).attend()
