"""The tree that shared blocks make: what every text has in common stands once, with the number of its owners."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from common.course.pictures.palette import FAINT, INK, MEMORY, hatched, legend, new_figure

SHARED, OWN = MEMORY["token_states"].color, MEMORY["reservation"].color
STEP, WIDTH, HEIGHT = 1.35, 1.1, 0.62  # from column to column; size of a block


@dataclass(frozen=True)
class TreeBlock:
    """One block.

    Attributes:
        block: its number in the pool.
        parent: number of the block before it; None at the beginning of a text.
        words: what its slots hold, as far as they are filled.
        owners: tables that name it.
        published: whether it can be found by its hash.
    """

    block: int
    parent: int | None
    words: tuple[str, ...]
    owners: int
    published: bool


def block_tree(blocks: Seq[TreeBlock], ends: Mapping[str, int], title: str = "") -> Figure:
    """Texts from left to right; where two part, the tree branches.

    Args:
        blocks: parents before their children.
        ends: sequence -> the last block of its table; written beside that block.
        title: above the picture.
    """
    places = place_blocks(blocks)
    columns = 1 + max(column for column, _ in places.values())
    rows = 1 + max(row for _, row in places.values())
    figure = new_figure(1.3 + 1.75 * columns, 1.2 + 0.75 * rows)
    axes = figure.subplots()
    for block in blocks:
        column, row = places[block.block]
        if block.parent is not None:
            _edge(axes, places[block.parent], (column, row))
        _draw(axes, block, column * STEP, row)
    for block in blocks:
        names = ", ".join(name for name, end in ends.items() if end == block.block)
        column, row = places[block.block]
        axes.text(
            column * STEP + WIDTH + 0.06, row, names, va="center", fontsize=9, color=INK, fontweight="bold"
        )
    axes.set_xlim(-0.1, columns * STEP + 0.35)
    axes.set_ylim(rows - 0.35, -0.65)
    axes.set_axis_off()
    axes.set_title(title, loc="left", fontsize=10, color=INK, fontweight="bold")
    legend(figure, [
        Patch(facecolor=SHARED, edgecolor=INK, label="several owners"),
        Patch(facecolor=OWN, edgecolor=INK, label="one owner"),
        Patch(label="no owner, still findable", **hatched(FAINT)),
        Patch(facecolor="none", edgecolor=INK, linestyle="--", label="not full: findable by nobody"),
    ])  # fmt: skip
    return figure


def place_blocks(blocks: Seq[TreeBlock]) -> dict[int, tuple[int, float]]:
    """Block -> (column, row): as deep as its chain is long, and in the middle of its children."""
    children: dict[int | None, list[int]] = {}
    for block in blocks:
        children.setdefault(block.parent, []).append(block.block)
    places: dict[int, tuple[int, float]] = {}
    leaves = 0

    def place(block: int, column: int) -> float:
        nonlocal leaves
        rows = [place(child, column + 1) for child in children.get(block, ())]
        if not rows:
            leaves += 1
        places[block] = (column, (rows[0] + rows[-1]) / 2 if rows else leaves - 1)
        return places[block][1]

    for root in children.get(None, ()):
        place(root, 0)
    return places


def _draw(axes: Axes, block: TreeBlock, left: float, row: float) -> None:
    fill: dict[str, Any] = {"facecolor": SHARED if block.owners > 1 else OWN, "linewidth": 0}
    corner = (left, row - HEIGHT / 2)
    axes.add_patch(Rectangle(corner, WIDTH, HEIGHT, **(fill if block.owners else hatched(FAINT))))
    line = "-" if block.published else "--"
    axes.add_patch(Rectangle(corner, WIDTH, HEIGHT, fill=False, edgecolor=INK, linewidth=1, linestyle=line))
    half = -(-len(block.words) // 2)
    text = " ".join(block.words[:half]) + "\n" + " ".join(block.words[half:])
    box = {"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none"}
    axes.text(
        left + WIDTH / 2, row, text.strip(), ha="center", va="center", fontsize=8, color="black", bbox=box
    )
    owners = f"{block.owners} owner" + ("" if block.owners == 1 else "s")
    axes.text(left, corner[1] - 0.04, f"block {block.block}: {owners}", va="bottom", fontsize=7, color=INK)


def _edge(axes: Axes, parent: tuple[int, float], child: tuple[int, float]) -> None:
    start, end = parent[0] * STEP + WIDTH, child[0] * STEP
    middle = (start + end) / 2
    axes.plot(
        [start, middle, middle, end], [parent[1], parent[1], child[1], child[1]], color=INK, linewidth=1
    )
