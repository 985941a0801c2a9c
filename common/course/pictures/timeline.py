"""A run over its forwards: who lay where in KV memory, and who sat in which place of the batch."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from common.bench.record import Key, Run, StepRecord
from common.course.pictures.palette import (
    FAINT,
    INK,
    dress,
    hatched,
    legend,
    new_figure,
    request_colors,
    tinted,
)

MIB = 1 << 20
NAMED = 12  # more requests than this are told apart by colour alone

Place = tuple[str, int, int]
"""(request id, index, first slot)."""
Stay = list[tuple[int, int, int]]
"""(forward, slots used, slots reserved) at each forward of a stay."""


def memory_map(run: Run, title: str = "") -> Figure:
    """KV memory over time: slots upwards, forwards to the right, one colour per request.

    Full colour is a stored token of an unfinished request; hatched is reserved and empty, or kept although
    its request has ended; blank is free.

    Args:
        run: recorded with its spans.
        title: above the picture.
    """
    capacity = run.steps[0].usage.capacity if run.steps else 0
    figure = new_figure(8.0, 3.4 if capacity else 1.3)
    axes = figure.subplots()
    dress(axes, title, "forward", "KV memory, token slots" if capacity else "")
    axes.set_xlim(0, max(len(run.steps), 1))
    if not capacity:
        axes.text(0.5, 0.5, "keeps no K/V: nothing is reserved", transform=axes.transAxes, ha="center",
                  color=INK, fontsize=10)  # fmt: skip
        axes.set_yticks([])
        return figure
    axes.set_ylim(0, capacity)
    colors = request_colors(list(run.added))
    for place, stay in _stays(run.steps):
        _draw_stay(axes, place[2], stay, colors[place[0]])
    _bytes_axis(axes, run.steps[0].usage.bytes_per_token)
    kept = Patch(label="reserved: empty, or its request has ended", **hatched(FAINT))
    free = Patch(facecolor="none", edgecolor=FAINT, label="free")
    legend(figure, [Patch(facecolor=FAINT, label="holds a token's K/V"), kept, free])
    return figure


def slot_timeline(run: Run, title: str = "", until: int | None = None) -> Figure:
    """The batch's places over time: one row per place, one colour per request, hatched where a place is idle.

    A sequence keeps the row in which it first appears.  Prompts are drawn dark-edged and full height,
    generated tokens lower.  A handful of requests are named as well.

    Args:
        run: recorded; its stretches of memory are not needed.
        title: above the picture.
        until: draw so many forwards, to put two runs side by side; None draws what there is.
    """
    figure = new_figure(8.0, max(2.0, 1.4 + 0.11 * run.max_num_seqs))  # room for the label of the rows
    axes = figure.subplots()
    colors = request_colors(list(run.added))
    rows = assign_rows(run.steps, run.max_num_seqs)
    axes.barh(range(run.max_num_seqs), len(run.steps), height=0.9, facecolor="none", edgecolor=FAINT,
              hatch="..", linewidth=0, alpha=0.6)  # fmt: skip
    for key, row, first, last, prompt in _sittings(run.steps, rows):
        axes.barh(row, last - first + 1, left=first, height=0.92 if prompt else 0.7, color=colors[key[0]],
                  edgecolor=INK if prompt else "none", linewidth=0.6)  # fmt: skip
        if prompt and len(colors) <= NAMED:
            axes.text(first + 0.5, row, key[0], ha="center", va="center", fontsize=8, color="black")
    axes.set_xlim(0, until or len(run.steps))
    axes.set_yticks(range(0, run.max_num_seqs, max(1, run.max_num_seqs // 8)))
    axes.set_ylim(run.max_num_seqs - 0.4, -0.6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    dress(axes, title, "forward", "place in the batch")
    many = Patch(facecolor=FAINT, edgecolor=INK, label="several tokens (prompt, or recomputed)")
    idle = Patch(facecolor="none", edgecolor=FAINT, hatch="..", label="idle place")
    legend(figure, [many, Patch(facecolor=FAINT, label="one new token"), idle])
    return figure


def assign_rows(steps: Seq[StepRecord], num_rows: int) -> list[dict[Key, int]]:
    """For each forward, the row of each sequence in it: its old row, or else the lowest that was not taken.

    A row stays taken from a sequence's first forward to its last, except while it waits in the queue again.
    """
    placed: list[dict[Key, int]] = []
    before: dict[Key, int] = {}
    for step in steps:
        now = [(part.request_id, part.index) for part in step.computed]
        rows = {key: before[key] for key in now if key in before}
        free = iter(sorted(set(range(num_rows)) - set(rows.values())))
        for key in now:
            if key not in rows:
                rows[key] = next(free)
        placed.append(rows)
        before = rows
    return placed


def _sittings(steps: Seq[StepRecord], rows: Seq[dict[Key, int]]) -> list[tuple[Key, int, int, int, bool]]:
    """(sequence, row, first forward, last forward, whether more than one token each): runs of like cells."""
    done: list[tuple[Key, int, int, int, bool]] = []
    open_: dict[Key, tuple[int, int, bool]] = {}  # row, first forward, long
    for number, (step, placed) in enumerate(zip(steps, rows, strict=True)):
        cells = {key: (placed[key], long) for key, long in _parts(step)}
        for key, (row, first, long) in list(open_.items()):
            if cells.get(key) != (row, long):
                done.append((key, row, first, number - 1, long))
                del open_[key]
        for key, (row, long) in cells.items():
            open_.setdefault(key, (row, number, long))
    return done + [(key, row, first, len(steps) - 1, long) for key, (row, first, long) in open_.items()]


def _parts(step: StepRecord) -> list[tuple[Key, bool]]:
    """(sequence, whether more than one of its tokens was computed)."""
    return [((part.request_id, part.index), part.num_new > 1) for part in step.computed]


def _stays(steps: Seq[StepRecord]) -> list[tuple[Place, Stay]]:
    """Each unbroken stay of a sequence at a start slot."""
    done: list[tuple[Place, Stay]] = []
    open_: dict[Place, Stay] = {}
    ended: set[Key] = set()
    for number, step in enumerate(steps):
        here = {(s.request_id, s.index, s.start): s for s in step.spans}
        for place in [place for place in open_ if place not in here]:
            done.append((place, open_.pop(place)))
        for place, span in here.items():
            used = 0 if place[:2] in ended else span.used
            open_.setdefault(place, []).append((number, used, span.reserved))
        ended.update(step.finished)
    return done + list(open_.items())


def _draw_stay(axes: Axes, start: int, stay: Stay, color: str) -> None:
    """Used slots in full colour from the start slot up, the rest of the reservation hatched above them."""
    x = np.arange(stay[0][0], stay[-1][0] + 2)  # each forward is one unit wide
    used, size = (np.array([*(row[i] for row in stay), stay[-1][i]]) for i in (1, 2))
    for fill in (tinted(color), hatched(color)):
        axes.fill_between(x, start + used, start + size, step="post", **fill)
    axes.fill_between(x, start, start + used, step="post", facecolor=color, linewidth=0)
    axes.hlines(start, x[0], x[-1], color=INK, linewidth=0.25)


def _bytes_axis(axes: Axes, bytes_per_token: int) -> None:
    """The same height in MiB, on the right."""
    mib = axes.twinx()
    mib.set_ylim(0, axes.get_ylim()[1] * bytes_per_token / MIB)
    mib.set_ylabel("MiB", fontsize=9, color=INK)
    mib.tick_params(labelsize=8, colors=INK, length=3)
    for side, spine in mib.spines.items():
        spine.set_visible(side == "right")
        spine.set_color(INK)
