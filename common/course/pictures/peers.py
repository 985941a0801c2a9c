"""Engines side by side, one panel per workload."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from matplotlib.figure import Figure

from common.course.pictures.palette import FAINT, INK, dress, new_figure, stage_color


def peer_bars(panels: Mapping[str, Mapping[str, float]], ours: Collection[str]) -> Figure:
    """One panel of bars per workload, each with its own scale.

    Args:
        panels: what a panel shows, with its unit -> engine -> figure, in the order to draw.
        ours: engines that are stages; the others are drawn in grey and hatched.
    """
    rows = [max(1, len(values)) for values in panels.values()]
    figure = new_figure(7.0, sum(0.9 + 0.3 * count for count in rows))
    grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[0.9 + 0.3 * count for count in rows])
    for axes, (title, values) in zip(grid[:, 0], panels.items(), strict=True):
        colors = [stage_color(name) if name in ours else FAINT for name in values]
        bars = axes.barh(list(values), list(values.values()), color=colors, edgecolor=INK, linewidth=0.6)
        for name, bar in zip(values, bars, strict=True):
            bar.set_hatch("" if name in ours else "//")
            axes.text(bar.get_width(), bar.get_y() + bar.get_height() / 2, f"  {values[name]:.4g}", va="center",
                      fontsize=8, color=INK)  # fmt: skip
        axes.invert_yaxis()
        axes.set_xlim(0, max([*values.values(), 1e-9]) * 1.18)
        dress(axes, xlabel=title)
    return figure
