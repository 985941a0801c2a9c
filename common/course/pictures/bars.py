"""Bars: speed per stage, and where the KV memory goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from common.bench.memory import Split
from common.course.pictures.palette import INK, MEMORY, dress, legend, new_figure, stage_color

LABEL_BOX = {"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none"}


def throughput_bars(
    tokens_per_second: Mapping[str, float], spread: Mapping[str, tuple[float, float]] | None = None
) -> Figure:
    """One bar per stage, labelled with its speed and how many times stage 1's (the first bar's) that is.

    Args:
        tokens_per_second: stage -> output tokens per second, in the order to draw.
        spread: stage -> (slowest, fastest) of several runs, drawn as a whisker.
    """
    names, values = list(tokens_per_second), list(tokens_per_second.values())
    figure = new_figure(7.0, 0.9 + 0.5 * len(names))
    axes = figure.subplots()
    axes.barh(names, values, color=[stage_color(name) for name in names], edgecolor=INK, linewidth=0.6)
    for row, (name, value) in enumerate(tokens_per_second.items()):
        far = value
        if spread is not None:
            low, far = spread[name]
            axes.plot([low, far], [row, row], color=INK, linewidth=1.5, marker="|", markersize=7)
        label = f"  {value:.1f}" + (f"  ({value / values[0]:.1f}x)" if row and values[0] else "")
        axes.text(far, row, label, va="center", fontsize=9, color=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, max([*values, *(high for _, high in (spread or {}).values())]) * 1.22)
    dress(axes, xlabel="output tokens per second (higher is better)")
    return figure


def memory_bars(splits: Mapping[str, Split]) -> Figure:
    """One stacked bar per system: what its KV memory was used for, in percent, as the paper's Fig. 2.

    Args:
        splits: label -> split, in slots or as shares.
    """
    figure = new_figure(7.0, 1.6 + 0.55 * len(splits))
    axes = figure.subplots()
    rows = list(splits)
    left = [0.0] * len(rows)
    shares = [asdict(splits[row].share) for row in rows]
    for kind, mark in MEMORY.items():
        widths = [100 * share[kind] for share in shares]
        axes.barh(rows, widths, left=left, color=mark.color, hatch=mark.hatch, edgecolor=INK,
                  linewidth=0.5)  # fmt: skip
        for row, (start, width) in enumerate(zip(left, widths, strict=True)):
            if width >= 6:
                axes.text(start + width / 2, row, f"{width:.1f}", ha="center", va="center", fontsize=9,
                          color="black", bbox=LABEL_BOX)  # fmt: skip
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    dress(axes, xlabel="share of KV memory, %")
    legend(
        figure,
        [Patch(facecolor=m.color, hatch=m.hatch, edgecolor=INK, label=m.label) for m in MEMORY.values()],
    )
    return figure
