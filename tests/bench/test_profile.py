"""`sixstage bench profile`: parts that add up, an engine left as it was, and every figure in the report."""

from __future__ import annotations

import json

import pytest
from support.engines import build

from common import runner
from common.batch import ForwardBatch
from common.bench import profile_clock
from common.bench.profile import Step, profile, run, summarise
from common.bench.profile_clock import FORWARD, PARTS, PartClock, clocked
from common.errors import InvalidValue
from common.model.loader import load_model, load_tokenizer
from common.output import OutputProcessor
from common.stages import STAGES

MODEL = "tiny-llama"
REQUESTS = [{"prompt": [5, 6, 7], "output": 4}, {"prompt": [8] * 20, "output": 2}]


@pytest.fixture(scope="module")
def model():
    return load_model(MODEL, dtype="float32")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(MODEL)


class FakeTime:
    """A clock that only stands where it is put."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def time(monkeypatch):
    fake = FakeTime()
    monkeypatch.setattr(profile_clock, "time", fake)
    return fake


def test_time_belongs_to_the_innermost_part(time):
    clock = PartClock()

    def work():
        time.now += 5

    def outer():
        time.now += 1
        inner()
        time.now += 2
        inner()

    inner = clock.timed("attention", work)
    time.now += 7
    clock.timed("small", outer)()
    assert clock.lap() == dict.fromkeys(PARTS, 0.0) | {"attention": 10.0, "small": 3.0, "other": 7.0}
    time.now += 1
    assert clock.lap() == dict.fromkeys(PARTS, 0.0) | {"other": 1.0}  # a lap starts from nothing


def test_a_part_that_fails_gives_the_clock_back(time):
    clock = PartClock()
    with pytest.raises(ZeroDivisionError):
        clock.timed("head", lambda: 1 / 0)()
    time.now += 3
    assert clock.lap()["other"] == 3


@pytest.mark.parametrize("name", STAGES)
def test_every_stage_is_taken_apart(name, model, tokenizer):
    steps = profile(build(name, model), tokenizer, REQUESTS)
    # Stage 1 takes one request after the other, and counts all of the text in each step.
    assert len(steps) == (6 if name == "stage1_naive" else 4)
    for step in steps:
        assert set(step.seconds) == set(PARTS)
        assert all(step.seconds[part] > 0 for part in (*FORWARD, "sampling", "batch", "booking", "text"))
    assert steps[0].num_tokens > steps[0].num_seqs
    assert name == "stage1_naive" or (steps[-1].num_seqs, steps[-1].num_tokens) == (1, 1)
    if name >= "stage2":
        assert all(step.seconds["scheduling"] > 0 for step in steps)


def test_nothing_stays_wrapped(model, tokenizer):
    """An engine that nobody looks at runs none of the clock's code."""
    engine, processor = build("stage5_prefix_sharing", model), OutputProcessor(tokenizer)
    pack, sample, layer = ForwardBatch.__dict__["pack"], runner.sample, dict(vars(model.layers[0]))
    with clocked(engine, processor):
        assert runner.sample is not sample
        assert model.layers[0].qkv is not layer["qkv"]
    assert ForwardBatch.__dict__["pack"] is pack
    assert runner.sample is sample
    assert vars(model.layers[0]) == layer
    assert "forward" not in vars(model)
    assert not {"attend", "prepare"} & vars(engine.kv).keys()


def test_figures_of_both_kinds_of_steps():
    """Made-up steps: a prompt of ten tokens beside a decode, and two decode steps of two."""

    def step(num_seqs, num_tokens, **seconds):
        return Step({part: seconds.get(part, 0.0) for part in PARTS}, num_seqs, num_tokens)

    found = summarise([step(2, 11, linear=5.0), step(2, 2, linear=3.0, text=1.0), step(2, 2, head=2.0)])
    assert found["seconds"]["linear"] == 8.0
    assert found["prompt"]["steps"] == 1
    assert found["prompt"]["tokens"] == 11
    decode = found["decode"]
    assert (decode["steps"], decode["num_seqs"], decode["seconds"]) == (2, 2, 6.0)
    assert decode["median_s"]["linear"] == 1.5
    assert decode["outside_forward"] == pytest.approx(0.5 / 3.0)
    assert summarise([step(1, 4, linear=1.0)])["decode"] is None


def test_the_command_writes_every_figure(tmp_path):
    results = run(
        model=MODEL, dtype="float32", quick=True, workloads=["W3", "W4"], out=tmp_path, max_num_seqs=8
    )
    written = json.loads((tmp_path / "profile.json").read_text())
    assert written == json.loads(json.dumps(results))
    assert list(written["cases"]) == ["stage5_prefix_sharing, W3", "stage5_prefix_sharing, W4"]
    case = written["cases"]["stage5_prefix_sharing, W4"]
    assert case["decode"]["num_seqs"] == 3
    assert case["prompt"]["tokens"] == 3 * 64
    assert 0 < case["decode"]["outside_forward"] < 1
    for kind in ("prompt", "decode"):
        assert (tmp_path / f"profile-{kind}.svg").read_text().startswith("<svg")
    page = (tmp_path / "profile.html").read_text()
    for name in PARTS.values():
        assert name in page


def test_unknown_workload_is_refused():
    with pytest.raises(InvalidValue, match="W9"):
        run(model=MODEL, workloads=["W9"])
