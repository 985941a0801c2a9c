"""One moment of a contiguous cache: what each stretch of the slab holds, and what it only keeps from others."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from common.course.pictures.palette import INK, MEMORY, dress, legend, new_figure


@dataclass(frozen=True)
class Piece:
    """One sequence's stretch, in token slots.

    Attributes:
        start: its first slot.
        stored: slots that hold tokens of an unfinished answer.
        later: slots that this answer will come to use.
        never: slots that it will not: the answer ends before, or has ended already.
    """

    start: int
    stored: int
    later: int
    never: int


@dataclass(frozen=True)
class Slab:
    """A contiguous cache at one forward."""

    capacity: int  # token slots
    pieces: Seq[Piece]  # in slot order
    somebody_waits: bool  # free slots are then of no use to the head of the queue


def reservations(slabs: Mapping[str, Slab]) -> Figure:
    """One strip per policy, slots to the right: what is stored, set aside, wasted and free.

    Args:
        slabs: label -> the cache.  They may differ in capacity; each strip is as long as its own.
    """
    figure = new_figure(8.0, 1.3 + 0.75 * len(slabs))
    axes = figure.subplots()
    for row, slab in enumerate(slabs.values()):
        _strip(axes, row, slab)
    axes.set_yticks(range(len(slabs)), [f"{label}\n{len(s.pieces)} requests" for label, s in slabs.items()])
    axes.set_ylim(len(slabs) - 0.5, -0.5)
    axes.set_xlim(0, max(slab.capacity for slab in slabs.values()))
    dress(axes, xlabel="KV memory, token slots")
    legend(
        figure,
        [Patch(facecolor=m.color, hatch=m.hatch, edgecolor=INK, label=m.label) for m in MEMORY.values()],
    )
    return figure


def _strip(axes: Axes, row: int, slab: Slab) -> None:
    free = MEMORY["external" if slab.somebody_waits else "rest"]
    axes.barh(
        row, slab.capacity, height=0.6, color=free.color, hatch=free.hatch, edgecolor=INK, linewidth=0.4
    )
    for piece in slab.pieces:
        left = piece.start
        for kind, width in (
            ("token_states", piece.stored),
            ("reservation", piece.later),
            ("internal", piece.never),
        ):
            mark = MEMORY[kind]
            axes.barh(row, width, left=left, height=0.6, color=mark.color, hatch=mark.hatch, edgecolor=INK,
                      linewidth=0.3)  # fmt: skip
            left += width
        axes.vlines(piece.start, row - 0.34, row + 0.34, color=INK, linewidth=0.6)
