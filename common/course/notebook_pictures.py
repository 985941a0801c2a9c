"""Small pictures that only the workshop notebooks need; the rest are those of `common.course.pictures`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from common.course.pictures.palette import (
    FAINT,
    INK,
    MEMORY,
    STAGES,
    dress,
    hatched,
    legend,
    new_figure,
    request_colors,
)

RIGHT, WRONG = STAGES[3], STAGES[5]
READABLE = 20  # with more columns than this a cell's number would not be readable


def curves(x: Seq[float], lines: Mapping[str, Seq[float]], xlabel: str, ylabel: str) -> Figure:
    """A few curves over the same x, told apart by marker as well as by colour.

    Args:
        x: ascending.
        lines: label -> its values, as many as `x`.
        xlabel: what x is, with its unit.
        ylabel: what the values are.
    """
    figure = new_figure(6.5, 2.8)
    axes = figure.subplots()
    for (label, y), color, marker in zip(
        lines.items(), (STAGES[2], STAGES[1], STAGES[3]), "osv", strict=False
    ):
        axes.plot(x, y, color=color, marker=marker, markersize=4, linewidth=1.5, label=label)
    axes.set_ylim(bottom=0)
    dress(axes, xlabel=xlabel, ylabel=ylabel)
    axes.legend(fontsize=8, frameon=False, labelcolor=INK)
    return figure


def bars(values: Mapping[str, float], xlabel: str) -> Figure:
    """One bar per label, with its value.

    Args:
        values: label -> value of at least 0, from top to bottom.
        xlabel: what the values are, with their unit.
    """
    figure = new_figure(6.5, 0.7 + 0.28 * len(values))
    axes = figure.subplots()
    axes.barh(list(values), list(values.values()), color=MEMORY["token_states"].color, height=0.7)
    for row, value in enumerate(values.values()):
        text = f"  {value:,.0f}" if value >= 100 else f"  {value:.3g}"
        axes.text(value, row, text, va="center", fontsize=8, color=INK)
    axes.set_xlim(0, 1.15 * max(values.values()))
    axes.invert_yaxis()
    dress(axes, xlabel=xlabel)
    return figure


def compare(got: torch.Tensor, wanted: torch.Tensor, title: str = "") -> Figure:
    """What a kernel wrote, cell by cell: right, wrong, or never written (NaN).

    Args:
        got: `[columns]` or `[rows, columns]`.
        wanted: likewise.
        title: above the picture.
    """
    got, wanted = torch.atleast_2d(got), torch.atleast_2d(wanted)
    rows, columns = got.shape
    figure = new_figure(7.0, 0.9 + 0.32 * rows)
    axes = figure.subplots()
    for row in range(rows):
        for column in range(columns):
            value, right = float(got[row, column]), float(wanted[row, column])
            missing = math.isnan(value)
            good = abs(value - right) <= 1e-4 + 1e-4 * abs(right)
            fill = hatched(WRONG) if not good else {"facecolor": RIGHT, "alpha": 0.35, "linewidth": 0}
            axes.add_patch(Rectangle((column, row), 1, 1, **(hatched(FAINT) if missing else fill)))
            axes.add_patch(Rectangle((column, row), 1, 1, fill=False, edgecolor=INK, linewidth=0.5))
            if columns <= READABLE:
                text = "?" if missing else f"{value:.4g}"
                axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=8, color=INK)
    axes.set_xlim(-0.05, columns + 0.05)
    axes.set_ylim(rows + 0.05, -0.05)
    axes.set_axis_off()
    axes.set_title(title, loc="left", fontsize=10, color=INK, fontweight="bold")
    legend(figure, [
        Patch(facecolor=RIGHT, alpha=0.35, label="right"),
        Patch(label="wrong", **hatched(WRONG)),
        Patch(label="never written", **hatched(FAINT)),
    ])  # fmt: skip
    return figure


def parted(
    totals: Mapping[str, float], spared: Mapping[str, float], xlabel: str, done: str, spared_label: str
) -> Figure:
    """One bar per label, in two parts: what was spared, hatched, and the rest of the total.

    Args:
        totals: label -> length of its bar, from top to bottom.
        spared: label -> the hatched part of it.
        xlabel: what the lengths are, with their unit.
        done: what the full part is.
        spared_label: what the hatched part is.
    """
    figure = new_figure(6.5, 1.0 + 0.3 * len(totals))
    axes = figure.subplots()
    color = MEMORY["token_states"].color
    for row, (name, total) in enumerate(totals.items()):
        axes.barh(row, spared[name], height=0.7, **hatched(color))
        axes.barh(row, total - spared[name], left=spared[name], height=0.7, color=color)
    axes.set_yticks(range(len(totals)), list(totals))
    axes.invert_yaxis()
    dress(axes, xlabel=xlabel)
    legend(figure, [Patch(facecolor=color, label=done), Patch(label=spared_label, **hatched(color))])
    return figure


def arrivals(times: Mapping[str, Seq[float]], xlabel: str = "seconds") -> Figure:
    """When the pieces of each answer came: a row per answer, a mark per piece.

    Args:
        times: answer -> when each of its pieces came.
        xlabel: the unit of the times.
    """
    figure = new_figure(6.5, 0.8 + 0.35 * len(times))
    axes = figure.subplots()
    colors = request_colors(list(times))
    for row, (name, moments) in enumerate(times.items()):
        axes.plot(moments, [row] * len(moments), color=colors[name], marker="|", markersize=9, linewidth=0.6)
    axes.set_yticks(range(len(times)), list(times))
    axes.set_ylim(len(times) - 0.4, -0.6)
    axes.set_xlim(left=0)
    dress(axes, xlabel=xlabel)
    return figure
