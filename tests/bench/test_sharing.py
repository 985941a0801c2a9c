"""The sharing experiment: its counts against figures worked out in another way, and the whole command."""

from __future__ import annotations

import json

import pytest
import torch
from support.counting import CONFIG

from common.bench import sharing, sharing_speed
from common.bench.conversations import chat_talks
from common.bench.job import Job
from common.bench.report_files import read_report
from common.bench.sharing_beams import BeamScale, beam_requests, drive_resubmitted, questions
from common.bench.sharing_counts import chat_hits, count_savings, ideal_hit_rate, sample_savings, shared_share
from common.bench.sharing_report import prompt_tokens_computed
from common.bench.sharing_speed import Stopwatch, first_tokens, hash_cost, make_engine, prefix_reading
from common.bench.workloads import TraceRequest, make_trace
from common.errors import InvalidValue
from common.generate import drive
from common.model.config import ModelConfig
from common.model.loader import load_model

SHAPE = ModelConfig(
    "Shape", 49152, 576, 1536, 30, 9, 3, 64, 8192, 1e-5, (1.0,) * 32, eos_token_ids=frozenset({2})
)
STAGE = "stage5_prefix_sharing"
PER_TOKEN = CONFIG.kv_bytes_per_token(torch.float32)


def quiet(what: str) -> None:
    """Nobody looks."""


def test_ideal_by_hand():
    """Turn 1: 10 new, 5 said, so 14 were computed.  Turn 2: 14 + 3 new, 8 said: 24.  Turn 3: 24 + 1 new."""
    talk = [(10, 5), (3, 8), (1, 2)]
    assert ideal_hit_rate([talk], 3, 1) == (14 + 24) / (10 + 17 + 25)
    assert ideal_hit_rate([talk], 3, 4) == (12 + 24) / (10 + 17 + 25)
    assert ideal_hit_rate([talk], 3, 16) == (0 + 16) / (10 + 17 + 25)
    assert ideal_hit_rate([talk, talk], 4, 4) == (12 + 24) / (10 + 17 + 25 + 10)


def test_with_memory_enough_every_block_that_can_be_found_is_found():
    """Closed form from the counts = hits of the real engine; with little memory blocks are evicted."""
    found = chat_hits(Job(STAGE, num_requests=100), (4096, 1 << 19), SHAPE, torch.bfloat16, quiet)
    short, ample = found["by_budget"].values()
    assert ample["hit_rate"] == found["ideal"] == ideal_hit_rate(chat_talks(100, 0).conversations, 100, 16)
    assert ample["evictions"] == ample["preemptions"] == 0
    assert short["hit_rate"] < 0.5 * ample["hit_rate"]
    assert short["evictions"] > 0
    assert short["tokens_computed"] > ample["tokens_computed"]
    assert found["ideal"] < found["ideal_by_token"] < 1


def held_by_hand(trace: list[TraceRequest], n: int, size: int) -> tuple[int, int]:
    """(blocks with sharing, without), over all forwards: full blocks of the prompt once, the rest n times."""
    held = named = 0
    for item in trace:
        prompt = len(item.prompt_token_ids)
        for t in range(item.output_len):
            blocks = -(-(prompt + t) // size)
            common = blocks if t == 0 else prompt // size  # before the first write all is in common
            held += common + n * (blocks - common)
            named += n * blocks
    return held, named


@pytest.mark.parametrize("n", [2, 5])
def test_parallel_answers_save_what_they_should(n):
    """Counted by the allocator = by hand, to the block; no two prompts begin alike."""
    lengths = [(9, 4), (3, 12), (16, 7), (1, 1)]
    trace = [TraceRequest((5 + i,) * prompt, output, 60) for i, (prompt, output) in enumerate(lengths)]
    job = Job(
        STAGE, kv_bytes=1024 * PER_TOKEN, max_num_seqs=64, block_size=4, kernel="reference", max_model_len=64
    )
    held, named = held_by_hand(trace, n, 4)
    assert count_savings(job, trace, n, CONFIG, torch.float32) == pytest.approx(1 - held / named, abs=1e-12)


def test_savings_are_the_papers():
    """Fig. 15 on Alpaca: 6.09 and 9.79 % at n = 2 and 6.  Counted within two points, and s (1 - 1/n) within one."""
    job = Job(STAGE, num_requests=400)
    [found] = sample_savings(job, ["alpaca"], (2, 6), SHAPE, torch.bfloat16, quiet).values()
    assert found["shared"] == pytest.approx(0.12, abs=0.02)
    for n, paper in ((2, 0.0609), (6, 0.0979)):
        figures = found["by_n"][str(n)]
        assert figures["closed_form"] == pytest.approx(found["shared"] * (1 - 1 / n))
        assert figures["saved"] == pytest.approx(figures["closed_form"], abs=0.01)
        assert figures["saved"] == pytest.approx(paper, abs=0.02)


@pytest.mark.parametrize(("n", "paper"), [(2, 0.162), (6, 0.305)])
def test_long_answers_save_what_the_paper_says(n, paper):
    """Fig. 15 on ShareGPT: from 16.2 to 30.5 %; by the closed form within three points."""
    trace = make_trace("sharegpt-paper", 1000, vocab_size=500)
    assert shared_share(trace, 16) * (1 - 1 / n) == pytest.approx(paper, abs=0.03)


def test_share_by_hand():
    """Prompt 5, answer 3, blocks of 4: blocks of 5, 6 and 7 tokens are 2 each, one of them full of prompt."""
    assert shared_share([TraceRequest((1,) * 5, 3, 3)], 4) == 3 / 6
    assert shared_share([TraceRequest((1,) * 3, 3, 3)], 4) == 0


@pytest.mark.parametrize(
    ("caching", "computed"),
    [(True, (132 + 36, 96)), (False, (2 * 132, 0))],  # six blocks of 100 tokens are full
)
def test_a_warm_request_computes_the_end_of_its_prompt_only(monkeypatch, caching, computed):
    """The experiment's two prompts share just the system prompt, and only a stage with a cache finds it."""
    engines = []
    monkeypatch.setattr(
        sharing_speed, "make_engine", lambda *a: engines.append(make_engine(*a)) or engines[-1]
    )
    job = Job(STAGE, "tiny-llama", kv_bytes=1 << 20, enable_prefix_caching=caching, kernel="reference")
    [found] = first_tokens(job, {"one": {}}, load_model("tiny-llama"), 1, quiet, system_len=100).values()
    assert found["warm_share"] == found["warm_s"] / found["cold_s"]
    assert [(engine.stats.tokens_computed, engine.stats.cache.hits) for engine in engines] == [computed] * 2


def test_hashing_is_timed_in_a_run_that_finds_nothing():
    model = load_model("tiny-llama")
    job = Job(
        STAGE,
        "tiny-llama",
        workload="sharegpt",
        num_requests=3,
        longest=24,
        kv_bytes=1 << 20,
        kernel="reference",
    )
    found = hash_cost(job, model, 1, quiet)
    assert found["hits"] == 0
    assert 0 < found["hash_s"] < found["run_s"]
    assert found["share"] == found["hash_s"] / found["run_s"]


def test_stopwatch_adds_up_and_passes_on():
    watch = Stopwatch(lambda a, b: a - b)
    assert watch(5, 3) == 2
    first = watch.seconds
    assert watch(1, 1) == 0
    assert watch.seconds > first > 0


def test_prefix_reading_times_every_rule(monkeypatch):
    monkeypatch.setattr(sharing_speed, "DECODES", 2)
    [row] = prefix_reading(
        Job(STAGE, "tiny-llama", kernel="reference"), (64,), load_model("tiny-llama"), quiet
    )
    assert row["prefix_tokens"] == 64
    assert set(row["step_s"]) == {"own choice", "never", "always"}
    assert all(seconds > 0 for seconds in row["step_s"].values())


def test_both_ways_of_beam_search_answer_alike():
    """What is timed against each other must be the same work."""
    model = load_model("tiny-llama", dtype="float64")
    job = Job(STAGE, "tiny-llama", "float64", kv_bytes=1 << 22, max_num_seqs=8, kernel="reference")
    requests = beam_requests(questions("tiny-llama", 1, 2), 3, 5)
    ways = {
        "fork": drive(make_engine(job, model), requests),
        "resubmit": drive_resubmitted(STAGE, make_engine(job, model), requests),
    }
    answers = {
        way: {out.request_id: out.new_token_ids for outputs in steps for out in outputs}
        for way, steps in ways.items()
    }
    assert answers["fork"] == answers["resubmit"]
    assert [len(tokens) for tokens in answers["fork"].values()] == [5, 5]


def test_prompt_tokens_computed():
    """Two answers of 4 and 3 tokens: 5 of them went through the model, the rest is prompts."""
    counters = {"tokens_computed": 30, "tokens_emitted": 7, "sequences_finished": 2}
    assert prompt_tokens_computed({"counters": counters}) == 25


def test_the_whole_command(tmp_path, monkeypatch):
    beams = BeamScale(((2, 1, 16),), answer=3, runs=1, saving_widths=(2,), short=(1, 3), long=(1, 3))
    scale = sharing.Scale(
        turns=12, longest=40, chat_turns=30, budgets=(2048, 1 << 16), sampled=5, prefixes=(32,), random=3, beams=beams,
        runs=1, fresh=False,
    )  # fmt: skip
    monkeypatch.setattr(sharing, "QUICK", scale)
    monkeypatch.setattr(sharing_speed, "DECODES", 2)
    found = sharing.run(
        model="tiny-llama",
        dtype="float32",
        kv_bytes=1 << 22,
        kernel="reference",
        quick=True,
        out=tmp_path,
        json=tmp_path / "a.json",
    )
    assert (
        json.loads((tmp_path / "a.json").read_text())["agents"]["stages"].keys()
        == found["agents"]["stages"].keys()
    )
    before, after = (stage["median"] for stage in found["agents"]["stages"].values())
    assert before["counters"]["tokens_emitted"] == after["counters"]["tokens_emitted"]
    assert prompt_tokens_computed(after) < prompt_tokens_computed(before)
    assert after["kv"]["reserved_bytes"]["mean"] < before["kv"]["reserved_bytes"]["mean"]
    text = (tmp_path / "sharing.md").read_text()
    assert f"| stage5_prefix_sharing | {prompt_tokens_computed(after):,.0f} |" in text
    assert f"ideal, whole blocks | {found['chat']['ideal']:.1%}" in text
    assert "Where it loses" in text
    assert {path.name for path in tmp_path.glob("*.svg")} == {
        "sharing-tree.svg", "sharing-copy.svg", "sharing-beams.svg",
    }  # fmt: skip
    again = [
        picture.alt for section in read_report(tmp_path / "a.json").sections for picture in section.pictures
    ]
    assert len(again) == 3
    assert again[-1].startswith("Beam search from"), "from the file alone, the search as it was recorded"


def test_a_stage_that_shares_is_needed(tmp_path):
    with pytest.raises(InvalidValue) as error:
        sharing.run(stages=[3, 4], model="tiny-llama", quick=True, out=tmp_path)
    assert error.value.field == "stages"
