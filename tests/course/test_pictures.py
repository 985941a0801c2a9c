"""Pictures say what the records say: their bars, areas and cells are measured, not only drawn."""

import re
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle
from support.counting import counting_engine

from common.bench.memory import Split
from common.bench.record import Recorder, Run
from common.course.pictures import (
    Piece,
    Slab,
    block_table,
    kv_growth,
    memory_bars,
    memory_map,
    reservations,
    slot_timeline,
    throughput_bars,
    to_png,
    to_svg,
)
from common.course.pictures.palette import INK, MEMORY, REQUESTS, STAGES, TINT, request_colors, stage_color
from common.course.pictures.timeline import assign_rows
from common.stages import STAGES as REGISTRY

LENGTHS = [(9, 4), (3, 8), (5, 1), (8, 7)]


def recorded(stage: str, **options) -> Run:
    engine, requests = counting_engine(stage, LENGTHS, **({"kv_tokens": 96} | options))
    return Recorder(engine).run(requests)


def luminance(color: str) -> float:
    """Relative lightness, 0 to 1: what is left of a colour in grey."""
    return float(np.dot(to_rgba(color)[:3], (0.2126, 0.7152, 0.0722)))


def areas(axes) -> dict[str, float]:
    """Area of the filled polygons by face colour and opacity, in data units."""
    found: dict[tuple, float] = {}
    for collection in axes.collections:
        if isinstance(collection, PolyCollection) and len(collection.get_facecolor()):
            for path in collection.get_paths():
                x, y = path.vertices[:-1].T
                area = 0.5 * abs(np.dot(x, np.roll(y, 1)) - np.dot(y, np.roll(x, 1)))
                key = tuple(np.round(collection.get_facecolor()[0], 3))
                found[key] = found.get(key, 0.0) + float(area)
    return found


def test_throughput_bars() -> None:
    speeds = {"stage1_naive": 8.0, "stage2_kvcache": 40.0}
    axes = throughput_bars(speeds, {"stage1_naive": (7.0, 9.0), "stage2_kvcache": (35.0, 60.0)}).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [8.0, 40.0]
    assert [label.get_text() for label in axes.get_yticklabels()] == list(speeds)
    assert [text.get_text().strip() for text in axes.texts] == ["8.0", "40.0  (5.0x)"]
    assert [list(line.get_xdata()) for line in axes.lines] == [[7.0, 9.0], [35.0, 60.0]]
    assert axes.get_xlim()[1] > 60.0
    assert axes.yaxis_inverted(), "the first stage is on top"


def test_memory_bars() -> None:
    splits = {"a": Split(20, 10, 50, 15, 5), "b": Split(96, 0, 4, 0, 0)}
    axes = memory_bars(splits).axes[0]
    widths = np.array([bar.get_width() for bar in axes.patches]).reshape(5, 2)
    lefts = np.array([bar.get_x() for bar in axes.patches]).reshape(5, 2)
    assert widths.T.tolist() == [[20, 10, 50, 15, 5], [96, 0, 4, 0, 0]]
    assert lefts.T.tolist() == [[0, 20, 30, 80, 95], [0, 96, 96, 100, 100]]
    assert {text.get_text() for text in axes.texts} == {"20.0", "10.0", "50.0", "15.0", "96.0"}
    legend = [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert legend == [mark.label for mark in MEMORY.values()]


def test_memory_map_areas_are_slot_forwards(stage: str) -> None:
    """Full colour covers the slots that live tokens fill, tint the rest of what is reserved, per request."""
    if stage == "stage1_naive":
        pytest.skip("stage 1 keeps no K/V")
    run = recorded(stage)
    found = areas(memory_map(run).axes[0])
    ended_at = {key[0]: number for number, step in enumerate(run.steps) for key in step.finished}
    for request_id, color in request_colors(list(run.added)).items():
        used = reserved = 0
        for number, step in enumerate(run.steps):
            for span in step.spans:
                if span.request_id == request_id:
                    live = span.used if number <= ended_at[request_id] else 0
                    used, reserved = used + live, reserved + span.reserved
        solid, tint = tuple(np.round(to_rgba(color), 3)), tuple(np.round(to_rgba(color, TINT), 3))
        assert found[solid] == pytest.approx(used)
        assert found[tint] == pytest.approx(reserved - used)


def test_memory_map_scales() -> None:
    run = recorded("stage2_kvcache")
    axes, right = memory_map(run, "a title").axes
    assert axes.get_xlim() == (0, len(run.steps))
    assert axes.get_ylim() == (0, 96)
    assert right.get_ylim() == (0, 96 * 64 / 2**20)
    assert axes.get_title(loc="left") == "a title"


def test_memory_map_of_a_stage_without_memory_says_so() -> None:
    axes = memory_map(recorded("stage1_naive")).axes[0]
    assert "keeps no K/V" in axes.texts[0].get_text()
    assert not axes.collections


def test_slot_timeline_cells_are_what_was_computed(stage: str) -> None:
    run = recorded(stage, max_num_seqs=2)
    axes = slot_timeline(run).axes[0]
    colors = request_colors(list(run.added))
    drawn = {}
    for bar in axes.patches:
        key = tuple(bar.get_facecolor())
        if bar.get_facecolor()[3]:  # idle places have no fill
            drawn[key] = drawn.get(key, 0) + bar.get_width()
    for request_id, color in colors.items():
        forwards = sum(part.request_id == request_id for step in run.steps for part in step.computed)
        assert drawn[to_rgba(color)] == forwards
    assert axes.get_xlim()[1] == len(run.steps)


def test_no_two_sequences_in_one_place(stage: str) -> None:
    run = recorded(stage, max_num_seqs=3)
    rows = assign_rows(run.steps, 3)
    for before, now in pairwise(rows):
        assert len(set(now.values())) == len(now)
        assert set(now.values()) <= {0, 1, 2}
        assert all(now[key] == row for key, row in before.items() if key in now), "nobody moves"


def test_block_table() -> None:
    figure = block_table(
        {"A": [5, 0], "B": [3]}, pool_size=8, block_size=4, lengths={"A": 6, "B": 4}, columns=4
    )
    left, right = figure.axes
    assert [text.get_text() for text in left.texts] == ["A", "5", "0", "B", "3"]
    labels = {text.get_text(): text.get_position() for text in right.texts if "." in text.get_text()}
    assert labels == {"A.1": (0.5, 0.55), "B.0": (3.5, 0.55), "A.0": (1.5, 1.55)}
    solid = {}
    for patch in right.patches:
        if isinstance(patch, Rectangle) and patch.get_facecolor()[3] == 1.0 and patch.get_fill():
            solid[patch.get_x(), patch.get_y()] = patch.get_width()
    assert solid == {(0, 0): 0.5, (3, 0): 1.0, (1, 1): 1.0}, "A's second block holds 2 of 4 tokens"


def test_reservations() -> None:
    """Each stretch in its place, three kinds side by side; what is free is dotted only where somebody waits."""
    slabs = {
        "a": Slab(100, (Piece(0, 10, 20, 30), Piece(70, 5, 0, 5)), somebody_waits=True),
        "b": Slab(80, (Piece(0, 0, 0, 40),), somebody_waits=False),
    }
    axes = reservations(slabs).axes[0]
    bars = [
        (bar.get_x(), bar.get_width(), to_rgba(bar.get_facecolor()))
        for bar in axes.patches
        if bar.get_width()
    ]
    kinds = {kind: to_rgba(mark.color) for kind, mark in MEMORY.items()}
    assert bars == [
        (0, 100, kinds["external"]),
        (0, 10, kinds["token_states"]), (10, 20, kinds["reservation"]), (30, 30, kinds["internal"]),
        (70, 5, kinds["token_states"]), (75, 5, kinds["internal"]),
        (0, 80, kinds["rest"]), (0, 40, kinds["internal"]),
    ]  # fmt: skip
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a\n2 requests", "b\n1 requests"]
    assert axes.get_xlim() == (0, 100)


def test_kv_growth_of_stage_1_is_a_triangle_and_of_stage_2_a_staircase() -> None:
    def widths(stage: str) -> list[tuple[float, float]]:
        bars = kv_growth(recorded(stage), "0").axes[0].patches
        return [
            (cached.get_width(), new.get_width()) for cached, new in zip(bars[::2], bars[1::2], strict=True)
        ]

    assert widths("stage1_naive") == [(0, 9), (0, 10), (0, 11), (0, 12)]
    assert widths("stage2_kvcache") == [(0, 9), (9, 1), (10, 1), (11, 1)]


def test_axes_are_labelled() -> None:
    run = recorded("stage2_kvcache")
    for figure in (
        memory_map(run),
        slot_timeline(run),
        kv_growth(run, "0"),
        throughput_bars({"stage1_naive": 1.0}),
    ):
        axes = figure.axes[0]
        assert axes.get_xlabel()
        assert axes.get_ylabel() or axes.get_yticklabels()


def test_kinds_differ_in_grey() -> None:
    """Neighbours in a picture must be told apart without hue: by lightness or by hatch."""
    for first, second in zip(REQUESTS, REQUESTS[1:] + REQUESTS[:1], strict=True):
        assert abs(luminance(first) - luminance(second)) > 0.1
    marks = list(MEMORY.values())
    for i, a in enumerate(marks):
        for b in marks[i + 1 :]:
            assert a.hatch != b.hatch or abs(luminance(a.color) - luminance(b.color)) > 0.2
    assert len(set(STAGES)) == 6
    assert [stage_color(name) for name in REGISTRY] == list(STAGES[: len(REGISTRY)])


def test_svg_takes_the_pages_ink_and_says_what_it_shows() -> None:
    figure = throughput_bars({"stage1_naive": 1.0, "stage2_kvcache": 2.0})
    themed, plain = to_svg(figure, 'one & "two"'), to_svg(figure, "x", themed=False)
    assert themed.startswith('<svg role="img" aria-label="one &amp; &quot;two&quot;"')
    assert INK not in themed
    assert "currentColor" in themed
    assert INK in plain
    assert re.search(r"fill: (white|#ffffff)", plain)
    assert to_svg(figure, "x") == to_svg(figure, "x"), "the same picture is the same file"


def test_png() -> None:
    assert to_png(throughput_bars({"stage1_naive": 1.0})).startswith(b"\x89PNG")
