"""Copy-on-write, moment by moment: tables on the left, the blocks that they name on the right."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from common.course.pictures.palette import INK, hatched, new_figure, request_colors

SLOT, GAP = 1.0, 0.5  # width of a token slot; between blocks


@dataclass(frozen=True)
class Moment:
    """What tables and blocks held at one moment.

    Attributes:
        title: what has just happened.
        tables: sequence -> its block table.
        words: block -> what its slots hold, as far as they are filled.
        owners: block -> its reference count.
        copies: target -> source of the copies that this moment brought.
    """

    title: str
    tables: Mapping[str, Seq[int]]
    words: Mapping[int, Seq[str]]
    owners: Mapping[int, int]
    copies: Mapping[int, int]


def copy_on_write(moments: Seq[Moment], block_size: int) -> Figure:
    """One row per moment.  A block has a stripe in the colour of each sequence whose table names it.

    Args:
        moments: in order.
        block_size: slots of a block.
    """
    colors = request_colors(list(moments[-1].tables))
    blocks = sorted({block for moment in moments for block in moment.words})
    figure = new_figure(9.0, 0.2 + 1.35 * len(moments))
    grid = figure.subplots(len(moments), 2, width_ratios=(1, 2.4), squeeze=False)
    widest = max(len(table) for moment in moments for table in moment.tables.values())
    for (left, right), moment in zip(grid, moments, strict=True):
        _draw_tables(left, moment, colors, widest)
        _draw_blocks(right, moment, colors, blocks, block_size)
        left.set_title(moment.title, loc="left", fontsize=10, color=INK, fontweight="bold")
    return figure


def _draw_tables(axes: Axes, moment: Moment, colors: Mapping[str, str], widest: int) -> None:
    for row, (name, table) in enumerate(moment.tables.items()):
        axes.text(0, row + 0.5, name, ha="right", va="center", fontsize=9, color=INK)
        for i, block in enumerate(table):
            axes.add_patch(
                Rectangle((i + 0.2, row + 0.1), 1, 0.8, facecolor=colors[name], edgecolor=INK, linewidth=0.7)
            )
            _label(axes, i + 0.7, row + 0.5, str(block))
    axes.set_xlim(-2.2, widest + 0.4)
    axes.set_ylim(len(moment.tables), 0)
    axes.set_axis_off()


def _draw_blocks(
    axes: Axes, moment: Moment, colors: Mapping[str, str], blocks: Seq[int], block_size: int
) -> None:
    width = block_size * SLOT
    left = {block: i * (width + GAP) for i, block in enumerate(blocks)}
    for block, words in moment.words.items():
        named = [color for name, color in colors.items() if block in moment.tables.get(name, ())]
        for i, color in enumerate(named):
            axes.add_patch(Rectangle((left[block], i / len(named)), len(words) * SLOT, 1 / len(named),
                                     facecolor=color, linewidth=0))  # fmt: skip
            axes.add_patch(Rectangle((left[block] + len(words) * SLOT, i / len(named)),
                                     width - len(words) * SLOT, 1 / len(named), **hatched(color)))  # fmt: skip
        for slot in range(block_size):
            axes.add_patch(
                Rectangle((left[block] + slot * SLOT, 0), SLOT, 1, fill=False, edgecolor=INK, linewidth=0.7)
            )
        for slot, word in enumerate(words):
            _label(axes, left[block] + (slot + 0.5) * SLOT, 0.5, word)
        owners = moment.owners[block]
        text = f"block {block}: {owners} owner" + ("" if owners == 1 else "s")
        axes.text(left[block], -0.08, text, va="bottom", fontsize=8, color=INK)
    for target, source in moment.copies.items():
        arrow = {"arrowstyle": "->", "color": INK, "connectionstyle": "angle,angleA=0,angleB=90"}
        to, at = (left[target] + width / 2, 1.08), (left[source] + width / 2, 1.75)
        text = f"copy of block {source}"
        axes.annotate(text, to, at, fontsize=9, color=INK, ha="center", arrowprops=arrow)
    axes.set_xlim(-0.1, len(blocks) * (width + GAP))
    axes.set_ylim(1.9, -0.5)
    axes.set_axis_off()


def _label(axes: Axes, x: float, y: float, text: str) -> None:
    box = {"boxstyle": "round,pad=0.12", "fc": "white", "ec": "none", "alpha": 0.85}
    axes.text(x, y, text, ha="center", va="center", fontsize=8, color="black", bbox=box)
