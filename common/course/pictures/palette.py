"""One set of colours and marks for every picture, so that a colour means the same in all chapters.

What a picture says never hangs on hue alone: kinds differ in lightness and hatch too, so it survives a grey
printer and colour-blind eyes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch

INK = "#24292f"  # text, axes and outlines; `export.to_svg` can turn it into the page's own text colour
FAINT = "#8b949e"  # grid lines and what is not the point

STAGES = ("#8b949e", "#d99a2b", "#2f7ebc", "#3b9c5e", "#8a63b8", "#c8553d")
"""Stage 1 to 6."""

REQUESTS = ("#2f7ebc", "#e0a83c", "#3b9c5e", "#d98cb3", "#7a4fa3", "#6cc5d9", "#b5472f", "#a3b84b")
"""Requests in order of arrival, again from the start after the eighth; neighbours differ in lightness."""


@dataclass(frozen=True)
class Mark:
    """How one kind of thing is drawn."""

    label: str
    color: str
    hatch: str = ""


MEMORY = {
    "token_states": Mark("token states", "#1f5f94"),
    "reservation": Mark("reservation (used later)", "#8fc1e3", "//"),
    "internal": Mark("internal (never used)", "#e9b44c", "xx"),
    "external": Mark("external (free, but fits nobody)", "#c9a3bf", ".."),
    "rest": Mark("rest (free)", "#e6e9ec"),
}
"""The kinds of KV memory of `common.bench.memory.Split`."""

TINT = 0.15  # opacity below the hatch


def hatched(color: str) -> dict[str, Any]:
    """How to fill what is set aside and empty: hatched in its colour, over nothing.

    (SVG draws a filled hatch in one opacity, so that fill and lines of one colour would melt into one.)
    """
    return {"facecolor": "none", "edgecolor": color, "hatch": "////", "linewidth": 0}


def tinted(color: str) -> dict[str, Any]:
    """A faint ground for `hatched`."""
    return {"facecolor": to_rgba(color, TINT), "linewidth": 0}


def stage_color(stage: str) -> str:
    """A stage's colour, by the number in its name ("stage3_paged")."""
    return STAGES[(int(stage[5]) - 1) % len(STAGES)] if stage[5:6].isdigit() else FAINT


def request_colors(request_ids: list[str]) -> dict[str, str]:
    """A colour for each request, in order of arrival."""
    return {request_id: REQUESTS[i % len(REQUESTS)] for i, request_id in enumerate(request_ids)}


def new_figure(width: float, height: float) -> Figure:
    """A figure of this size in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def dress(axes: Axes, title: str = "", xlabel: str = "", ylabel: str = "") -> None:
    """Labels, and only the lines that are needed."""
    axes.set_title(title, loc="left", fontsize=10, color=INK, fontweight="bold")
    axes.set_xlabel(xlabel, fontsize=9, color=INK)
    axes.set_ylabel(ylabel, fontsize=9, color=INK)
    axes.tick_params(labelsize=8, colors=INK, length=3)
    axes.patch.set_alpha(0.0)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)


def legend(figure: Figure, handles: list[Patch]) -> None:
    """One line of keys below everything else."""
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False,
                  labelcolor=INK)  # fmt: skip
