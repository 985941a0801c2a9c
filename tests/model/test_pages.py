"""Memory in pages of its own."""

from __future__ import annotations

import mmap

import pytest
import torch

from common.pages import pages


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_zeros_that_can_be_written(dtype):
    """They begin at a page, are contiguous, and outlive everything but themselves."""
    one, other = pages(3, 5, 7, dtype=dtype), pages(3, 5, 7, dtype=dtype)
    assert one.shape == (3, 5, 7)
    assert one.dtype == dtype
    assert one.is_contiguous()
    assert one.data_ptr() % mmap.PAGESIZE == 0
    assert not one.any()
    part = one.fill_(2)[1]
    del one
    assert (part == 2).all()
    assert not other.any()


def test_none():
    """An mmap of nothing is an error; a cache without heads is not."""
    assert pages(4, 0, dtype=torch.float32).shape == (4, 0)


def test_a_system_without_huge_pages_gives_small_ones(monkeypatch):
    class Refusing(mmap.mmap):
        def madvise(self, *_):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Refusing)
    assert pages(9, dtype=torch.float32).fill_(1).sum() == 9
