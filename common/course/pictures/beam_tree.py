"""A beam search as it went: who grew from whom, step by step, and which branches were dropped."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from common.course.pictures.palette import INK, MEMORY, dress, new_figure

ALIVE, DROPPED = MEMORY["token_states"].color, "#e6e9ec"


@dataclass(frozen=True)
class BeamNode:
    """One live beam at one step.

    Attributes:
        parent: place of its parent among the beams of the step before.
        word: the token that it added.
        shared: blocks of its table that another live beam names as well.
        own: blocks that only it names.
    """

    parent: int
    word: str
    shared: int
    own: int


def beam_tree(prompt: str, steps: Seq[Seq[BeamNode]]) -> Figure:
    """Steps from left to right, the likeliest beam on top; what leads to a last beam is dark, the rest was dropped.

    Args:
        prompt: what was asked, at the root.
        steps: the live beams after each step, best first.
    """
    figure = new_figure(1.9 + 1.15 * len(steps), 1.1 + 0.5 * max(len(beams) for beams in steps))
    axes = figure.subplots()
    kept = survivors(steps)
    middle = (len(steps[0]) - 1) / 2
    _box(axes, 0, middle, prompt, True)
    for step, beams in enumerate(steps):
        for place, beam in enumerate(beams):
            alive = place in kept[step]
            start = (step, beam.parent if step else middle)
            axes.plot((start[0], step + 1), (start[1], place), color=INK, linewidth=1.6 if alive else 0.7,
                      linestyle="-" if alive else ":", zorder=1)  # fmt: skip
            _box(axes, step + 1, place, beam.word, alive)
    for place, beam in enumerate(steps[-1]):
        axes.text(len(steps) + 0.55, place, f"{beam.shared} shared + {beam.own} own blocks", va="center", fontsize=8,
                  color=INK)  # fmt: skip
    axes.set_xlim(-0.6, len(steps) + 2.2)
    axes.set_ylim(max(len(beams) for beams in steps) - 0.5, -0.5)
    dress(axes, xlabel="step")
    axes.set_xticks(range(1, len(steps) + 1))
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    figure.legend(
        handles=[Patch(facecolor=ALIVE, edgecolor=INK, label="leads to a beam that lives"),
                 Patch(facecolor=DROPPED, edgecolor=INK, label="dropped later"),
                 Line2D([], [], color=INK, label="grew from")],
        loc="outside lower center", ncols=3, fontsize=8, frameon=False, labelcolor=INK,
    )  # fmt: skip
    return figure


def survivors(steps: Seq[Seq[BeamNode]]) -> list[set[int]]:
    """For each step, the places of the beams that a beam of the last step descends from (itself included)."""
    kept = [set(range(len(steps[-1])))]
    for beams in reversed(steps[1:]):
        kept.insert(0, {beams[place].parent for place in kept[0]})
    return kept


def _box(axes: Axes, x: float, y: float, word: str, alive: bool) -> None:
    axes.text(x, y, word, ha="center", va="center", fontsize=8, color="white" if alive else "black", zorder=2,
              bbox={"boxstyle": "round,pad=0.3", "fc": ALIVE if alive else DROPPED, "ec": INK, "lw": 0.6})  # fmt: skip
