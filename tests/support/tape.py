"""What a CUDA graph is, on the CPU: the operators of one run, written down and done again on the same tensors.

Python does not run at a replay, as with the real thing.  So whatever the work has asked Python (a length, a
branch on a value, a new tensor made of numbers) stays as it was when it was captured, and shows as a wrong result.
Reading a value on the host, which a capturing GPU refuses, is refused here too.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

HOST_READS = ("item", "_local_scalar_dense", "is_nonzero", "nonzero", "resolve_conj")
"""Operators that wait for a value; `resolve_conj` is how `tolist` and `numpy` begin."""
HOST_WRITES = ("lift_fresh",)
"""How `torch.tensor` ends: a copy from pageable memory."""


class Tape(TorchDispatchMode):
    """Operators in order, with the very tensors that they read and wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[Callable, tuple, dict, Any]] = []
        self.in_kernel = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run an operator; keep it, unless it is part of a kernel that is kept as a whole."""
        if self.in_kernel:
            return func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in HOST_READS + HOST_WRITES:
            raise RuntimeError(f"aten.{name} is not permitted while capturing")
        return self.keep(func, args, kwargs or {})

    def launch(self, kernel: Callable, args: tuple, kwargs: dict) -> Any:
        """Run a kernel as one entry, like a launch: nobody looks inside."""
        self.in_kernel = True
        try:
            return self.keep(kernel, args, kwargs)
        finally:
            self.in_kernel = False

    def keep(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Run and write down; lists of numbers are frozen as they are now."""
        args, kwargs = tree_map(lambda leaf: leaf, (args, kwargs))
        out = function(*args, **kwargs)
        self.entries.append((function, args, kwargs, out))
        return out

    def replay(self) -> None:
        """Do it all again; what an operator newly made goes where the captured run had it."""
        for function, args, kwargs, out in self.entries:
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class TapeRecorder:
    """A `common.graphs.Recorder` without a GPU."""

    def __init__(self) -> None:
        self.tape: Tape | None = None

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `Recorder.capture`; warms up as the real one does."""
        work()
        tape = self.tape = Tape()
        try:
            with tape:
                work()
        finally:
            self.tape = None
        return tape.replay

    def launched(self, kernel: Any) -> SimpleNamespace:
        """A kernel module whose calls are entries of this recorder's tapes."""

        def wrap(function: Callable) -> Callable:
            def call(*args: Any, **kwargs: Any) -> Any:
                if self.tape is None:
                    return function(*args, **kwargs)
                return self.tape.launch(function, args, kwargs)

            return call

        return SimpleNamespace(
            store_kv=wrap(kernel.store_kv), paged_attention=wrap(kernel.paged_attention), gather=kernel.gather
        )
