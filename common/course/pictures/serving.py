"""What users feel as ever more of them come."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from matplotlib.figure import Figure

from common.course.pictures.palette import FAINT, INK, dress, new_figure, stage_color

MARKERS = ("v", "s", "^", "D", "o", "P")


def latency_curves(curves: Mapping[str, Seq[Mapping[str, float]]], limit: float) -> Figure:
    """Normalised latency against request rate, one curve per system, as the PagedAttention paper's Fig. 12.

    Args:
        curves: label -> points with `rate`, `latency_s_per_token`, `requests` and `finished`.  A point with
            requests that never finished is drawn hollow: its latency is at least that.
        limit: seconds per token at which the picture ends.
    """
    figure = new_figure(7.0, 3.6)
    axes = figure.subplots()
    for number, (label, points) in enumerate(curves.items()):
        staged = label.startswith("stage")
        color = stage_color(label) if staged else INK
        marker = MARKERS[number % len(MARKERS)]
        rates = [point["rate"] for point in points]
        heights = [min(point["latency_s_per_token"], limit) for point in points]
        axes.plot(
            rates,
            heights,
            color=color,
            linewidth=1.8,
            linestyle="-" if staged else ":",
            label=label,
            zorder=2,
        )
        for point, height in zip(points, heights, strict=True):
            whole = point["finished"] == point["requests"]
            axes.plot(point["rate"], height, marker=marker, color=color, zorder=3,
                      markerfacecolor=color if whole else "none")  # fmt: skip
    axes.axhline(limit, color=FAINT, linewidth=0.8, linestyle="--")
    axes.set_ylim(0, 1.06 * limit)
    axes.set_xlim(left=0)
    dress(axes, xlabel="requests per second", ylabel="normalised latency, s per token")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False, labelcolor=INK)
    return figure
