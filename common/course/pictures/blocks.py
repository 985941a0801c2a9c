"""Pictures of one idea each: block tables over a pool, and K/V that grows token by token."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from common.bench.record import Run
from common.course.pictures.palette import (
    INK,
    dress,
    hatched,
    legend,
    new_figure,
    request_colors,
    tinted,
)

WHOLE = 64  # blocks; of a larger pool the empty end is left out


def block_table(
    tables: Mapping[str, Seq[int]],
    pool_size: int,
    block_size: int,
    lengths: Mapping[str, int],
    columns: int = 8,
) -> Figure:
    """Logical blocks of each sequence on the left, the pool of physical blocks on the right.

    A left cell holds the number of the physical block; the right cell of that number says whose it is and
    which of its blocks.  The coloured part of a right cell is the part that holds tokens.

    Args:
        tables: sequence -> its block table, as in `Sequence.block_table`.
        pool_size: N, physical blocks; of a large pool only those up to the last held one are drawn.
        block_size: tokens per block.
        lengths: sequence -> tokens stored.
        columns: physical blocks per row of the drawing.
    """
    colors = request_colors(list(tables))
    last = max((block for table in tables.values() for block in table), default=0)
    shown = pool_size if pool_size <= WHOLE else min(pool_size, (last // columns + 2) * columns)
    rows = -(-shown // columns)
    figure = new_figure(9.0, 1.4 + 0.5 * max(rows, len(tables)))
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    widest = max((len(table) for table in tables.values()), default=0)
    for row, (name, table) in enumerate(tables.items()):
        left.text(-0.2, row + 0.5, name, ha="right", va="center", fontsize=9, color=INK)
        for column, block in enumerate(table):
            _cell(left, column, row, colors[name], 1.0, str(block))
    _frame(left, max(widest, 1), max(len(tables), 1), "block tables: logical -> physical")
    owner = {block: (name, i) for name, table in tables.items() for i, block in enumerate(table)}
    for block in range(shown):
        row, column = divmod(block, columns)
        if block not in owner:
            _cell(right, column, row, None, 0.0, "")
        else:
            name, i = owner[block]
            filled = min(max(lengths[name] - i * block_size, 0), block_size) / block_size
            _cell(right, column, row, colors[name], filled, f"{name}.{i}")
        right.text(column + 0.06, row + 0.2, str(block), fontsize=6, color=INK, va="center")
    rest = f", the first {shown} of them" if shown < pool_size else ""
    _frame(right, columns, rows, f"pool: {pool_size} blocks of {block_size} tokens{rest}")
    return figure


def kv_growth(run: Run, request_id: str, title: str = "", index: int = 0) -> Figure:
    """One sequence, forward by forward: which positions were computed, and which were read from the cache.

    Each row is a forward, each column a position of the sequence.
    """
    key = (request_id, index)
    parts = [part for step in run.steps for part in step.computed if (part.request_id, part.index) == key]
    longest = max((part.context for part in parts), default=1)
    figure = new_figure(7.0, 1.2 + min(0.12 * len(parts), 5.0))
    axes = figure.subplots()
    color = request_colors([request_id])[request_id]
    for row, part in enumerate(parts):
        known = part.context - part.num_new
        axes.barh(row, known, height=0.85, **hatched(color))
        axes.barh(row, part.num_new, left=known, height=0.85, color=color)
    axes.set_xlim(0, longest)
    axes.set_ylim(len(parts) - 0.5, -0.5)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    dress(axes, title, "position in the sequence", "forward")
    cached = Patch(label="K/V read from the cache", **hatched(color))
    legend(figure, [Patch(facecolor=color, label="computed in this forward"), cached])
    return figure


def _cell(axes: Axes, column: float, row: float, color: str | None, filled: float, text: str) -> None:
    """A unit square: outline, the filled share of it from the left, a word in the middle."""
    if color is not None:
        axes.add_patch(Rectangle((column, row), 1, 1, **tinted(color)))
        axes.add_patch(Rectangle((column, row), filled, 1, facecolor=color, linewidth=0))
    axes.add_patch(Rectangle((column, row), 1, 1, fill=False, edgecolor=INK, linewidth=0.7))
    if text:
        box = {"boxstyle": "round,pad=0.12", "fc": "white", "ec": "none", "alpha": 0.85}
        axes.text(
            column + 0.5, row + 0.55, text, ha="center", va="center", fontsize=8, color="black", bbox=box
        )


def _frame(axes: Axes, columns: int, rows: int, title: str) -> None:
    axes.set_xlim(-0.05, columns + 0.05)
    axes.set_ylim(rows + 0.05, -0.05)
    axes.set_aspect("equal")
    axes.set_axis_off()
    axes.set_title(title, loc="left", fontsize=10, color=INK, fontweight="bold")
