"""Decode steps recorded on a CPU: what a step calls is written down once, and from then on only called.

The compiled functions of a decode step (`compiled.py`: norms, linear layers, attention) are fast, but between two
of them Python finds sizes, makes tensors and checks arguments.  That is some 10 microseconds each time, and two or
three times as much in a step than in a loop, because the weights that pass through the caches push Python's code
and objects out.  All of it comes to the same at every step of the same size.  So a recording is a list

    (norm of rows, its addresses), (multiply, its addresses), (rotate, its addresses), ...

of 303 calls for SmolLM2-135M, made again in order.  Addresses must stay right, so results that exist only within
the forward lie in a `Pool`, which is the recorder's.  The few operators of torch (embedding, angles, a bias) are
written down as well, with their tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from common.compiled import LINE, LISTENER, share_threads

HOST_READS = ("item", "_local_scalar_dense", "is_nonzero", "nonzero", "resolve_conj")
"""Operators that hand values to Python, which would stay as they were; `tolist` and `numpy` begin with the last."""

HOST_WRITES = ("lift_fresh",)
"""How `torch.tensor` ends: numbers that Python had."""

ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


class HostRecorder:
    """A `common.graphs.Recorder` for CPUs; its recordings share one pool, since one is played at a time."""

    def __init__(self) -> None:
        self.pool = Pool()

    def capture(self, work: Callable[[], None]) -> Recording:
        """Do the work once and write down how; see `Recorder.capture`.

        Raises:
            RuntimeError: Python looked at a value.
        """
        recording = Recording(work)
        token = LISTENER.set(recording.note)
        try:
            with _Operators(recording, self.pool):
                work()
        finally:
            LISTENER.reset(token)
        return recording


class Recording:
    """What some work called, in order."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def note(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Add a call; what it returns is as `common.compiled.launch` says."""
        self.calls.append((function, arguments))

    def __call__(self) -> None:
        """Do it again, on what its tensors hold now."""
        share_threads()
        for function, arguments in self.calls:
            wrong = function(*arguments)
            if wrong is not None and wrong >= 0:
                return self.work()  # which raises, and says what is wrong
        return None


class _Operators(TorchDispatchMode):
    """Tells a recording of torch's operators; their memory comes from a pool."""

    def __init__(self, recording: Recording, pool: Pool) -> None:
        super().__init__()
        self.recording = recording
        self.pool = pool

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and keep it with the very tensors that it read and wrote."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in HOST_READS + HOST_WRITES:
            raise RuntimeError(
                f"aten.{name} is not permitted while capturing: a replay would not do it again"
            )
        out = func(*args, **kwargs)
        if name in ALLOCATIONS:
            return self.pool.take(out) if out.is_contiguous() else out
        again = tree_map(self.pool.unheld, (func, args, kwargs))
        if func._schema.is_mutable:
            self.recording.note(_repeat, again)
        elif _places(out).isdisjoint(_places((args, kwargs))):  # a view need not be made again
            self.recording.note(_repeat_into, (out, *again))
        return out


def _places(tree: Any) -> set[int]:
    """Where the memory of each tensor begins; oneDNN's packed weights show none, and have no views."""
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.layout == torch.strided}


def _repeat(func: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """An operator that writes to its arguments."""
    func(*args, **kwargs)


def _repeat_into(out: Any, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """An operator that makes new tensors: what it gives belongs where it was when recorded."""
    again = func(*args, **kwargs)
    if isinstance(out, torch.Tensor):
        out.copy_(again)
    else:
        for old, new in zip(out, again, strict=True):
            old.copy_(new)


class Pool:
    """Memory for results; what nobody holds any more is lent again.

    So a recording of 30 layers needs the memory of one, which stays in the caches, and has the same addresses every
    time.
    """

    def __init__(self) -> None:
        self.pieces: dict[int, torch.Tensor] = {}  # all there are, of bytes, by address
        self.free: list[torch.Tensor] = []

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor of that shape and dtype; its bytes come back when no tensor sees them any more."""
        size = like.nbytes
        fitting = [i for i, piece in enumerate(self.free) if piece.nbytes >= size]
        if fitting:
            piece = self.free.pop(min(fitting, key=lambda i: self.free[i].nbytes))
        else:
            piece = torch.empty(-(-size // LINE) * LINE, dtype=torch.uint8)
            self.pieces[piece.data_ptr()] = piece
        lent = piece.numpy()  # a new object, which all tensors made of it keep alive
        weakref.finalize(lent, self.free.append, piece)
        return torch.from_numpy(lent)[:size].view(like.dtype).view(like.shape)

    def unheld(self, leaf: Any) -> Any:
        """The same tensor for a recording, which is not to keep its memory from others; all else as it is."""
        if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
            return leaf
        piece = self.pieces.get(leaf.untyped_storage().data_ptr())
        if piece is None:
            return leaf
        return piece.view(leaf.dtype).as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())
