"""`sixstage bench step`: parts that add up, cases that are what they say, pictures of what was measured."""

from __future__ import annotations

import pytest

from common.bench import profile_clock
from common.bench.step import PARTS as MADE_OF
from common.bench.step import Scale, run, step_cases, take_apart, time_by_length
from common.bench.step_report import roof_figures
from common.config import EngineConfig
from common.course.pictures import roofline, step_parts, token_time_curve
from common.course.pictures.steps import PARTS
from common.model.loader import load_model
from common.stages import find_stage


def test_parts_of_the_clock_are_used_once_each():
    """So that what a step is split into adds up to the step."""
    assert sorted(piece for pieces in MADE_OF.values() for piece in pieces) == sorted(profile_clock.PARTS)
    assert list(MADE_OF) == list(PARTS)


def test_cases():
    assert [(name, count) for _, name, count in step_cases(["stage1_naive", "stage2_kvcache"], 4)] == [
        ("stage1_naive", 1), ("stage2_kvcache", 1), ("stage2_kvcache", 4),
    ]  # fmt: skip


def test_roofs():
    """4 MB of bfloat16 weights are 2 million, so 4 million operations a token."""
    found = {
        "dtype": "bfloat16",
        "weight_bytes": 4e6,
        "read_bytes_per_second": 4e9,
        "multiply_flop_per_second": 4e10,
    }
    roof = roof_figures(found)
    assert roof["floor"] == pytest.approx(1.0)
    assert roof["forwards"] == pytest.approx(1000)
    assert roof["best"] == pytest.approx(10_000)
    assert roof["knee"] == pytest.approx(10)
    assert roof_figures(found | {"dtype": "float32"})["best"] == pytest.approx(20_000)


def test_real_engines_are_taken_apart():
    model = load_model("tiny-llama", dtype="float32")
    config = EngineConfig(kv_bytes=1 << 20, max_model_len=64)

    def make(name):
        return find_stage(name)[1].resolve()(model, config)

    parts = take_apart(make("stage2_kvcache"), 3, 8, 4)
    assert set(parts) == {*PARTS, "total", "tokens"}
    assert parts["tokens"] == 3
    assert all(parts[part] > 0 for part in PARTS)
    assert parts["total"] == pytest.approx(sum(parts[part] for part in PARTS))
    scale = Scale((4, 8), 1, 2, 8, 2, (1,))
    told = []
    found = time_by_length(["stage1_naive", "stage2_kvcache"], make, scale, told.append)
    assert [list(times) for times in found.values()] == [["4", "8"]] * 2
    assert len(told) == 4


class TestPictures:
    """Heights and widths are the numbers."""

    def test_curve(self):
        axes = token_time_curve(
            {"stage1_naive": {"16": 0.01, "64": 0.04}, "stage2_kvcache": {"16": 0.01, "64": 0.012}}
        )
        lines = axes.axes[0].lines
        assert [list(line.get_xdata()) for line in lines] == [[16, 64], [16, 64]]
        assert list(lines[0].get_ydata()) == [10, 40]
        assert [line.get_marker() for line in lines] == ["o", "s"], "told apart without colour"

    def test_parts(self):
        seconds = {"layers": 0.01, "attention": 0.02, "sampling": 0.003, "engine": 0.001}
        axes = step_parts({"a": seconds}).axes[0]
        assert [bar.get_width() for bar in axes.patches] == pytest.approx([10, 20, 3, 1])
        assert [bar.get_x() for bar in axes.patches] == pytest.approx([0, 10, 30, 33])
        assert "34.0 ms" in axes.texts[0].get_text()

    def test_roofline(self):
        points = [{"rows": 1, "seconds": 0.02}, {"rows": 16, "seconds": 0.04}]
        axes = roofline(points, tokens_per_read=100, tokens_per_multiply=800).axes[0]
        roof, measured = axes.lines
        assert list(measured.get_ydata()) == pytest.approx([50, 400])
        assert list(zip(*roof.get_data(), strict=True))[1] == pytest.approx((8, 800))


@pytest.mark.slow
def test_quick_run(tmp_path):
    found = run(model="tiny-llama", dtype="float32", quick=True, out=tmp_path)
    assert list(found["parts"]["cases"]) == [
        "stage1_naive, 1 request", "stage2_kvcache, 1 request", "stage2_kvcache, 4 requests",
    ]  # fmt: skip
    assert [point["rows"] for point in found["roofline"]["points"]] == [1, 4, 16]
    assert {path.name for path in tmp_path.glob("*.svg")} == {
        "step-by-length.svg", "step-parts.svg", "step-roofline.svg",
    }  # fmt: skip
