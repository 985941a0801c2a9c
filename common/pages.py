"""Memory in pages of its own, outside the heap; in huge pages where they pay and the system has them."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from contextlib import suppress

import torch

Pages = Callable[..., torch.Tensor]
"""`pages(*shape, dtype=dtype)`: zeros on the CPU, contiguous, from the beginning of a page."""

PIECE = 64 << 20
"""Bytes that an arena takes at a time."""


def pages(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU, contiguous, from the beginning of a page; given back to the system with the tensor.

    A page is taken when it is first written.
    """
    size = math.prod(shape)
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(_take(size * dtype.itemsize), dtype=dtype).view(shape)


class Arena:
    """`pages` for tensors that are written at once, live as long as each other, and are read over and over.

    They lie side by side in huge pages (2 MiB), which the processor finds in its table of addresses where 512 small
    ones would not be.  For a KV cache those are no gain: each is cleared when it is first touched, a block is much
    smaller, and 60 arrays would make the first answer wait 0.15 s.
    """

    def __init__(self) -> None:
        self.memory: mmap.mmap | None = None
        self.used = PIECE  # bytes of it

    def __call__(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """See `pages`; the memory is given back with the last tensor of a piece."""
        size = math.prod(shape)
        wanted = -(-size * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        if not size:
            return pages(*shape, dtype=dtype)
        if wanted > PIECE // 2:
            return torch.frombuffer(_take_huge(wanted), dtype=dtype, count=size).view(shape)
        if self.memory is None or self.used + wanted > PIECE:
            self.memory, self.used = _take_huge(PIECE), 0
        offset, self.used = self.used, self.used + wanted
        return torch.frombuffer(self.memory, dtype=dtype, count=size, offset=offset).view(shape)


def _take(size: int) -> mmap.mmap:
    """So many bytes, where a process can have them not shared with its children."""
    private = hasattr(mmap, "MAP_PRIVATE")
    return mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) if private else mmap.mmap(-1, size)


def _take_huge(size: int) -> mmap.mmap:
    """The same in huge pages if there are some; shared memory would have none, and asking for them be no error."""
    memory = _take(size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
