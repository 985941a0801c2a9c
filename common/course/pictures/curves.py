"""Curves over a setting: what one side gains and the other pays."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from common.course.pictures.palette import INK, STAGES, dress, new_figure


def budget_curve(by_budget: Mapping[str, Mapping[str, float]]) -> Figure:
    """The token budget's two sides: the others' longest gap between tokens, and the long prompt's own TTFT.

    Args:
        by_budget: budget -> `itl_max_s` and `ttft_s`, as `common.bench.token_budget` measures them.
    """
    figure = new_figure(7.0, 3.2)
    axes = figure.subplots()
    budgets = [int(budget) for budget in by_budget]
    gaps = [1e3 * figures["itl_max_s"] for figures in by_budget.values()]
    firsts = [1e3 * figures["ttft_s"] for figures in by_budget.values()]
    axes.plot(budgets, gaps, color=STAGES[3], marker="o", linewidth=2)
    axes.plot(budgets, firsts, color=STAGES[1], marker="s", linewidth=2, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(budgets, [str(budget) for budget in budgets])
    dress(axes, xlabel="token budget per forward", ylabel="milliseconds")
    figure.legend(
        handles=[
            Line2D([], [], color=STAGES[3], marker="o", label="longest gap between others' tokens"),
            Line2D([], [], color=STAGES[1], marker="s", ls="--", label="long prompt's time to first token"),
        ],
        loc="outside lower center",
        ncols=2,
        fontsize=8,
        frameon=False,
        labelcolor=INK,
    )
    return figure
