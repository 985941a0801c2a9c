"""A clock for the parts of an engine: time belongs to the innermost part that runs, so all parts add up.

Only while it looks: functions are wrapped for the length of a `with`, and an engine that nobody profiles runs
nothing of this.  Each wrapped call costs about half a microsecond, some 300 of them 0.2 ms of a step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from common import runner
from common.batch import ForwardBatch
from common.host_graphs import Recording
from common.output import OutputProcessor
from common.protocol import Engine

PARTS = {
    "linear": "linear layers",
    "attention": "attention",
    "small": "norms, rotation, activation",
    "head": "head",
    "sampling": "sampling",
    "scheduling": "scheduling",
    "batch": "batch building",
    "booking": "book-keeping",
    "text": "text and output",
    "other": "other Python",
}
"""Part -> its name for people, in the order of pictures and tables."""

FORWARD = ("linear", "attention", "small", "head")
"""The parts of the model's forward."""


class PartClock:
    """Adds up seconds by part; between two calls of `lap` the parts add up to the time that passed."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self.part = "other"
        self._since = time.perf_counter()

    def switch(self, part: str) -> str:
        """From now on time belongs to another part; returns the one that it belonged to."""
        now = time.perf_counter()
        self._seconds[self.part] += now - self._since
        before, self.part, self._since = self.part, part, now
        return before

    def lap(self) -> dict[str, float]:
        """Seconds of every part since the last call."""
        self.switch(self.part)
        seconds, self._seconds = self._seconds, dict.fromkeys(PARTS, 0.0)
        return seconds

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function; its time belongs to `part`, but for what it calls that is timed as well."""

        def timed(*args: Any, **options: Any) -> Any:
            before = self.switch(part)
            try:
                return call(*args, **options)
            finally:
                self.switch(before)

        return timed


@contextmanager
def clocked(engine: Engine, processor: OutputProcessor) -> Iterator[PartClock]:
    """Time the parts of an engine and of its text side; everything is put back at the end."""
    clock = PartClock()
    with ExitStack() as stack:
        for part, owner, name in _places(engine, processor):
            stack.enter_context(patch.object(owner, name, clock.timed(part, getattr(owner, name))))
        # What is recorded from here on keeps the part that it was recorded in; the engine's own come back at the end.
        stack.enter_context(patch.object(Recording, "note", _timed_note(clock)))
        if graphs := getattr(getattr(engine, "executor", None), "graphs", None):
            stack.enter_context(patch.dict(graphs.replays, clear=True))
        yield clock


def _timed_note(clock: PartClock) -> Callable[..., None]:
    """`Recording.note` for calls whose time belongs to whatever part is running now."""
    note = Recording.note

    def timed_note(recording: Recording, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        note(recording, clock.timed(clock.part, function), arguments)

    return timed_note


def _places(engine: Engine, processor: OutputProcessor) -> Iterator[tuple[str, object, str]]:
    """(part, owner, attribute) of each function that is timed; what a stage does not have is left out."""
    model: Any = engine.model
    for layer in model.layers:
        for name in ("qkv", "output", "gate_up", "down"):
            yield "linear", layer, name
    yield "head", model, "head"
    yield "small", model, "forward"
    yield "attention", engine.kv, "attend"
    yield "batch", engine.kv, "prepare"
    yield "batch", ForwardBatch, "pack"
    yield "sampling", runner, "sample"
    yield "booking", sys.modules[type(engine).__module__], "advance"
    yield "text", processor, "process"
    graphs = getattr(getattr(engine, "executor", None), "graphs", None)
    scheduler = getattr(engine, "scheduler", None)
    blocks = getattr(engine.kv, "blocks", None)
    if graphs:
        yield "batch", graphs, "_fill"
        yield "head", graphs, "_step"  # but for the forward in it
    for owner, name in (
        (engine, "_schedule"),
        (engine, "_release_finished"),
        (scheduler, "schedule"),
        (scheduler, "release_finished"),
        (blocks, "publish"),
    ):
        if hasattr(owner, name):
            yield "scheduling", owner, name
