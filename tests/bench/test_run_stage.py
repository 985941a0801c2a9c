"""`sixstage bench`: order, medians, fresh processes, and errors that stay one line."""

import json
import os
from dataclasses import replace

import pytest
from rich.console import Console

from common.bench import run_stage
from common.bench.environment import commit, cpu_name, environment, memory_bytes, peak_memory_bytes
from common.bench.job import Job, run_fresh, run_here
from common.bench.report_files import make_page
from common.bench.run_stage import bench, collect, merge, rounds, run_all
from common.errors import InvalidValue, SixstageError
from common.stages import STAGES

TINY = Job("stage2_kvcache", "tiny-llama", "float32", num_requests=3, longest=6, kv_bytes=1 << 20, max_model_len=64,
           kernel="reference")  # fmt: skip


def test_rounds_alternate() -> None:
    assert rounds(["a", "b", "c"], 3) == [
        (0, "a"), (0, "b"), (0, "c"), (1, "c"), (1, "b"), (1, "a"), (2, "a"), (2, "b"), (2, "c")]  # fmt: skip


def test_run_all_runs_in_that_order_and_sorts_by_label() -> None:
    order = []

    def do(job, on_progress):
        order.append(job.stage)
        on_progress(1, 2)
        return {"figures": {"output_tok_s": float(len(order))}}

    jobs = {"x": replace(TINY, stage="X"), "y": replace(TINY, stage="Y")}
    done = run_all(jobs, 2, Console(quiet=True), do)
    assert order == ["X", "Y", "Y", "X"]
    assert [result["figures"]["output_tok_s"] for result in done["x"]] == [1.0, 4.0]


def test_merge() -> None:
    values = [{"a": 1.0, "b": {"c": 5}, "d": None}, {"a": 3.0, "b": {"c": 4}, "d": None}]
    assert merge(values, min) == {"a": 1.0, "b": {"c": 4}, "d": None}


def test_collect_takes_medians_and_spread() -> None:
    def result(speed: float, trace: str = "t") -> dict:
        return {
            "figures": {"output_tok_s": speed},
            "trace_hash": trace,
            "environment": {"stage": "s", "cpu": "c"},
        }

    found = collect({"s": [result(3.0), result(9.0), result(4.0)]})
    stage = found["stages"]["s"]
    assert [stage[which]["output_tok_s"] for which in ("median", "min", "max")] == [4.0, 3.0, 9.0]
    assert len(stage["runs"]) == 3
    assert found["environment"] == {"cpu": "c"}
    with pytest.raises(ValueError, match="different traces"):
        collect({"s": [result(1.0)], "t": [result(1.0, "other")]})
    assert collect({"s": [result(1.0)], "t": [result(1.0, "other")]}, same_trace=False)["trace_hash"] == "t"


def test_a_job_serves_its_trace() -> None:
    found = run_here(TINY)
    trace = TINY.trace(300)
    counters = found["figures"]["counters"]
    assert counters["tokens_emitted"] == sum(item.output_len for item in trace)
    assert counters["prompt_tokens"] == sum(len(item.prompt_token_ids) for item in trace)
    assert found["environment"]["dtype"] == "float32"
    assert found["environment"]["kv_bytes"] == 1 << 20


def test_a_fresh_process_gives_the_same_counts() -> None:
    seen = []
    found = run_fresh(TINY, lambda done, total: seen.append((done, total)))
    here = run_here(TINY)
    assert found["trace_hash"] == here["trace_hash"]
    assert found["figures"]["counters"] == here["figures"]["counters"]
    total = here["figures"]["counters"]["tokens_emitted"]
    assert seen[-1] == (total, total)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_bytes": 100}, "kv_bytes: got 100"),
        ({"model": "no-such-model-anywhere"}, "no-such-model-anywhere"),
    ],
)
def test_a_childs_error_is_one_line(change, words) -> None:
    with pytest.raises(SixstageError) as error:
        run_fresh(replace(TINY, **change))
    assert words in str(error.value)
    assert str(error.value).startswith("stage2_kvcache: ")
    assert "\n" not in str(error.value)


def test_a_child_that_dies_is_said_so(monkeypatch) -> None:
    monkeypatch.setattr("common.bench.job.sys.executable", "/bin/false")
    with pytest.raises(
        SixstageError, match="stage2_kvcache: the run ended with exit code 1: it said nothing"
    ):
        run_fresh(TINY)


def test_bench_over_every_stage(tmp_path, monkeypatch) -> None:
    """In this process, to be quick; that a process of its own gives the same is shown above."""
    monkeypatch.setattr(run_stage.run_all, "__defaults__", (run_here,))
    found = bench(
        model="tiny-llama", quick=True, kernel="reference", out=tmp_path, json=tmp_path / "all.json"
    )
    assert list(found["stages"]) == list(STAGES)
    assert json.loads((tmp_path / "all.json").read_text())["trace_hash"] == found["trace_hash"]
    make_page([tmp_path / "all.json"], tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text() == (tmp_path / "bench.html").read_text()
    text = (tmp_path / "bench.md").read_text()
    for name, stage in found["stages"].items():
        assert f"| {name} | {stage['median']['output_tok_s']:.1f} |" in text
        assert set(stage["median"]["ttft_s"]) == {"p50", "p95", "p99", "mean"}


@pytest.mark.parametrize(
    ("arguments", "field"),
    [({"runs": 0}, "runs"), ({"workload": "none"}, "workload"), ({"num_requests": 0}, "num_requests"),
     ({"stages": ["x"]}, "stage"), ({"max_num_seqs": 0}, "max_num_seqs"), ({"kernel": "cuda"}, "kernel")],
)  # fmt: skip
def test_bench_refuses_before_it_starts(arguments, field, tmp_path) -> None:
    with pytest.raises(InvalidValue) as error:
        bench(model="tiny-llama", out=tmp_path, **arguments)
    assert error.value.field == field
    assert list(tmp_path.iterdir()) == []


def test_environment() -> None:
    found = environment(model="m", trace_hash="h")
    assert found["model"] == "m"
    assert found["trace_hash"] == "h"
    assert found["cores"] == os.cpu_count()
    assert found["packages"]["torch"]
    assert cpu_name()
    assert memory_bytes() is None or memory_bytes() > 1 << 28
    assert peak_memory_bytes() is None or 1 << 20 < peak_memory_bytes() < 1 << 40
    assert commit() is None or len(commit().removesuffix("+dirty")) == 40
    json.dumps(found)
