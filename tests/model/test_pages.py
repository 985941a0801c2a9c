"""Memory in pages of its own."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch

from common.pages import PIECE, Arena, pages


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
    assert Arena()(9, dtype=torch.float32).fill_(1).sum() == 9
    assert Arena()(PIECE, dtype=torch.uint8)[-1] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's list of mappings")
@pytest.mark.parametrize("memory", [pages, Arena()])
def test_it_is_the_process_s_own(memory):
    """Shared memory has no huge pages unless an administrator says so, though asking for some is no error."""
    tensor = memory(100, 1000, dtype=torch.float32)
    at = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, kind, *_ = line.split()
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= at < last:
            assert kind == "rw-p"
            return
    pytest.fail("no mapping has it")


def test_an_arena_s_tensors_lie_side_by_side():
    """Each begins at a page and none reaches into another; a large one goes elsewhere, and a full piece is followed."""
    arena, megabyte = Arena(), 1 << 20
    sizes = [3, megabyte, PIECE // 2 - megabyte, PIECE, PIECE // 2, megabyte, 0]
    tensors = [arena(size, dtype=torch.uint8).fill_(n) for n, size in enumerate(sizes)]
    assert [len(tensor) for tensor in tensors] == sizes
    assert all((tensor == n).all() for n, tensor in enumerate(tensors))
    places = [tensor.data_ptr() for tensor in tensors[:-1]]
    assert all(place % mmap.PAGESIZE == 0 for place in places)
    assert places[1] - places[0] == mmap.PAGESIZE
    assert places[2] - places[1] == megabyte
    assert not 0 <= places[3] - places[0] < PIECE
    assert not 0 <= places[4] - places[0] < PIECE  # no room beside the first three
    assert places[5] - places[4] == PIECE // 2


def test_an_arena_s_memory_outlives_it():
    """And is there while one of its tensors is."""
    arena = Arena()
    kept, gone = arena(5, dtype=torch.float32), arena(5, dtype=torch.float32)
    del arena, gone
    assert kept.fill_(1).sum() == 5
