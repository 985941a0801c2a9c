"""What reading an answer with tool calls yields, and what a reader of one promises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Text:
    """Text of the answer that belongs to no call; never empty."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call of a function begins; indexes count 0, 1, 2, ..."""

    index: int
    name: str


@dataclass(frozen=True)
class Arguments:
    """More of a call's arguments, which are JSON text; never empty, always after the call's start."""

    index: int
    text: str


ToolEvent = Text | CallStart | Arguments


class ToolParser(Protocol):
    """Reads one answer.  However its text is split, the events are the same once neighbours are joined."""

    def push(self, text: str) -> list[ToolEvent]:
        """Take more of the answer; what is certain by now."""
        ...

    def finish(self) -> list[ToolEvent]:
        """The answer has ended: what was held back."""
        ...
