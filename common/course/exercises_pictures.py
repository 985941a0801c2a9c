"""What a failed check looked like: pictures of the objects that the failing test had in its hands.

"pool"       block tables over the pool (stages 3 to 5)
"slab"       the contiguous reservations (stage 2)
"timeline"   who was in each forward, as the scheduler decided (stages 1 to 4)
"sharing"    tables, owners and due copies (stage 5)
"error"      how far an attention output is off, by query and head (stage 3)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from common.bench.record import Computed, Run, StepRecord
from common.course.pictures import Moment, block_table, copy_on_write, slot_timeline, to_png
from common.course.pictures.palette import INK, dress, hatched, legend, new_figure, request_colors
from common.protocol import EngineStats, KVUsage

LEADS_ON = ("kv", "blocks", "engine", "scheduler")
"""Attributes through which a test's object leads to the one that is drawn."""

Decision = tuple[object, list[tuple[str, int, int]]]
"""(who decided, (request id, index, tokens) of each sequence in the forward)."""


def draw_failure(kind: str, frames: Seq[FrameType], decisions: Seq[Decision], target: str) -> bool:
    """Draw the state at a failure into a PNG file.

    Args:
        kind: as in course.toml.
        frames: of the traceback, innermost last.
        decisions: what a scheduler decided, forward by forward.
        target: path of the file.

    Returns:
        Whether there was anything to draw.
    """
    figure = {
        "pool": lambda: _pool(_find(frames, "pool", "holders") or _find(frames, "free_blocks")),
        "slab": lambda: _slab(_find(frames, "stretches")),
        "timeline": lambda: _timeline(decisions),
        "sharing": lambda: _sharing(_find(frames, "copies", "holders")),
        "error": lambda: _error(frames),
    }[kind]()
    if figure is not None:
        Path(target).write_bytes(to_png(figure))
    return figure is not None


def _find(frames: Seq[FrameType], *attributes: str) -> Any:
    """The object with these attributes that is nearest to the failure; None if there is none."""
    for frame in reversed(frames):
        for value in frame.f_locals.values():
            for reached in _reach(value):
                if all(hasattr(reached, name) for name in attributes):
                    return reached
    return None


def _reach(value: object) -> Iterator[object]:
    yield value
    held = getattr(value, "__dict__", {})
    for name in LEADS_ON:
        if name in held:
            yield from _reach(held[name])


def _pool(blocks: Any) -> Figure | None:
    """Of block tables, or of a pool alone, where nobody knows whose a block is."""
    if blocks is None:
        return None
    if not hasattr(blocks, "holders"):
        held = sorted(set(range(blocks.num_blocks)) - set(blocks.free_blocks))
        return block_table({"held": held}, blocks.num_blocks, 1, {"held": len(held)})
    named = _named(blocks.holders.values())
    tables = {name: list(seq.block_table) for name, seq in named.items()}
    lengths = {name: len(seq.token_ids) for name, seq in named.items()}
    return block_table(tables, blocks.pool.num_blocks, blocks.block_size, lengths)


def _slab(cache: Any) -> Figure | None:
    """Slots from left to right, one line per reservation, so that two on the same slots are seen."""
    if cache is None:
        return None
    names = [stretch.seq.request_id for stretch in cache.stretches]
    colors = request_colors(list(dict.fromkeys(names)))
    figure = new_figure(8.0, 1.3 + 0.35 * max(1, len(names)))
    axes = figure.subplots()
    for row, stretch in enumerate(cache.stretches):
        color, used = colors[stretch.seq.request_id], stretch.seq.num_computed_tokens
        axes.add_patch(Rectangle((stretch.start, row + 0.1), stretch.size, 0.8, **hatched(color)))
        axes.add_patch(Rectangle((stretch.start, row + 0.1), used, 0.8, facecolor=color, linewidth=0))
        axes.add_patch(Rectangle((stretch.start, row + 0.1), stretch.size, 0.8, fill=False, edgecolor=INK))
    axes.set_yticks([row + 0.5 for row in range(len(names))], names)
    axes.set_xlim(0, cache.capacity)
    axes.set_ylim(max(1, len(names)), 0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    dress(axes, f"slab of {cache.capacity} slots", "slot")
    legend(figure, [Patch(facecolor=INK, label="holds a token"), Patch(label="reserved", **hatched(INK))])
    return figure


def _timeline(decisions: Seq[Decision]) -> Figure | None:
    """The batch's places, forward by forward, up to the failure."""
    if not decisions:
        return None
    nothing = KVUsage(capacity=0, reserved=0, used=0, bytes_per_token=0)
    steps = [
        StepRecord(0.0, tuple(Computed(name, index, count, 0) for name, index, count in parts), nothing)
        for _, parts in decisions
    ]
    places = max([1, *(len(parts) for _, parts in decisions)])
    added = dict.fromkeys((name for _, parts in decisions for name, _, _ in parts), 0.0)
    return slot_timeline(
        Run(steps, EngineStats(), places, added), "who was in each forward, up to the failure"
    )


def _sharing(blocks: Any) -> Figure | None:
    """Tables and owners now; a slot shows the position of the token that it holds."""
    if blocks is None:
        return None
    size = blocks.block_size
    tables: dict[str, list[int]] = {}
    words: dict[int, list[str]] = {}
    for name, seq in _named(blocks.holders.values()).items():
        tables[name] = list(seq.block_table)
        for i, block in enumerate(seq.block_table):
            filled = range(i * size, min((i + 1) * size, seq.num_computed_tokens))
            words[block] = max(words.get(block, []), [str(position) for position in filled], key=len)
    shown = {
        target: source for target, source in blocks.copies.items() if target in words and source in words
    }
    owners = dict(enumerate(blocks.pool.ref_counts))
    moment = Moment("at the failure", tables, words, owners, shown)
    return copy_on_write([moment], size) if tables else None


def _error(frames: Seq[FrameType]) -> Figure | None:
    """Of a test that has `out` and `expected`, `[T, Hq, D]` each: the largest error of each query and head."""
    for frame in reversed(frames):
        found = frame.f_locals
        if "out" in found and isinstance(found.get("expected"), np.ndarray):
            out = found["out"].double().cpu().numpy()  # [T, Hq, D]
            error = np.abs(out - found["expected"]).max(axis=2)  # [T, Hq]
            figure = new_figure(7.0, 3.2)
            axes = figure.subplots()
            shown = np.nan_to_num(error, nan=1e3).clip(1e-8, 1e3).T  # [Hq, T]
            image = axes.imshow(shown, cmap="Greys", norm=LogNorm(1e-8, 1e1), aspect="auto")
            figure.colorbar(image, label="largest error (NaN: black)")
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(MaxNLocator(integer=True))
            dress(axes, "where the output is off", "query token of the batch", "query head")
            return figure
    return None


def _named(sequences: Iterable[Any]) -> dict[str, Any]:
    """Request id, and the index of answers after the first; tests may use one name twice."""
    named: dict[str, Any] = {}
    for seq in sequences:
        name = str(seq.request_id) + (f".{seq.index}" if seq.index else "")
        while name in named:
            name += "'"
        named[name] = seq
    return named
