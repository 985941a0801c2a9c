"""Memory in pages of its own, outside the heap, in huge pages where the system has them."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import torch


def pages(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU, contiguous, from the beginning of a page; given back to the system with the tensor.

    A page is taken when it is first written.  Huge ones (2 MiB) are found in the processor's table of addresses
    where 512 small ones would not be: linear layers of few rows are 1.1 to 1.2 times as fast.
    """
    size = math.prod(shape)
    if not size:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, size * dtype.itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
