"""Small multiples: which figures, on what scale, with what range."""

from __future__ import annotations

import pytest

from common.bench.report_multiples import multiples


def figures(speed: float, first: float, **more: object) -> dict:
    return {"output_tok_s": speed, "ttft_s": {"p50": first}, **more}


def test_a_panel_for_each_figure_that_somebody_has() -> None:
    kv = {"live_bytes": {"mean": 30.0}, "reserved_bytes": {"mean": 40.0}}
    group = multiples(
        "W", "about", {"stage1_naive": figures(2.0, 0.5, kv=None), "other": figures(8.0, 2.0, kv=kv)}
    )
    assert [(panel.title, panel.better) for panel in group.panels] == [
        ("Output tokens per second", "more"), ("First token, median", "less"),
        ("Live of reserved KV memory", "more")]  # fmt: skip
    speed, first, live = group.panels
    assert [(bar.engine, bar.text, speed.share(bar.value)) for bar in speed.bars] == [
        ("stage1_naive", "2.0", 25.0), ("other", "8.0", 100.0)]  # fmt: skip
    assert [bar.text for bar in first.bars] == ["500 ms", "2.00 s"]
    assert [(bar.engine, bar.text) for bar in live.bars] == [("other", "75 %")], "who has none has no bar"


def test_the_scale_takes_in_the_range_of_the_runs() -> None:
    runs = {"median": figures(4.0, 0.0), "min": figures(3.0, 0.0), "max": figures(5.0, 0.0), "runs": []}
    speed, first = multiples("W", "about", {"stage6_api": runs}).panels
    [bar] = speed.bars
    assert [speed.share(value) for value in (bar.low, bar.value, bar.high)] == pytest.approx(
        [60.0, 80.0, 100.0]
    )
    assert first.share(first.bars[0].value) == 0.0, "nothing but zeros is no bar, and no fault"


def test_names_are_short_and_stages_have_their_colour() -> None:
    [panel] = multiples("W", "", {name: {"output_tok_s": 1} for name in
                        ("stage5_prefix_sharing", "stage2, true length", "llama-cpp", "stages")}).panels  # fmt: skip
    assert [(bar.number, bar.name) for bar in panel.bars] == [
        ("5", "5 prefix sharing"), ("2", "2, true length"), ("", "llama-cpp"), ("", "stages")]  # fmt: skip
