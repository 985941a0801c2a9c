"""`sixstage bench serve`: its clock, its client, its agents, and the whole of it on a tiny model."""

import asyncio
import json
import math
from itertools import pairwise

import pytest
from support.live_server import serve

from common.bench import serve as serve_bench
from common.bench.job import Job
from common.bench.serve import Scale, run
from common.bench.serve_agents import agent_figures, run_agents
from common.bench.serve_client import Goal, Outcome, body, replay, serving_figures
from common.bench.serve_offline import offline_process
from common.bench.serve_process import server_arguments, server_process
from common.bench.serve_stream import events
from common.bench.workloads import TraceRequest
from common.errors import InvalidValue, SixstageError


def test_figures_of_a_run() -> None:
    """Worked out by hand: one served well, one with a late first token, one given up."""
    good = Outcome(arrived=1.0, wanted=5, tokens=5, first=2.0, last=2.4)
    late = Outcome(arrived=0.0, wanted=2, tokens=2, first=5.0, last=5.1)
    given_up = Outcome(arrived=4.0, wanted=10, tokens=1, first=6.0, last=10.0)
    found = serving_figures([good, late, given_up], Goal(ttft_s=2.0, tpot_s=0.2))
    assert (found["requests"], found["finished"], found["seconds"]) == (3, 2, 10.0)
    assert found["goodput_rps"] == pytest.approx(0.1)
    assert found["met"] == pytest.approx(1 / 3)
    assert found["output_tok_s"] == pytest.approx(0.8)
    assert found["ttft_s"]["p50"] == pytest.approx(2.0)
    assert found["tpot_s"]["p50"] == pytest.approx(0.1)
    assert found["latency_s_per_token"] == pytest.approx((1.4 / 5 + 5.1 / 2 + 6 / 10) / 3)


@pytest.mark.parametrize(
    "outcome", [Outcome(0, 3, 3, 2.1, 2.2), Outcome(0, 3, 3, 0.1, 1.0), Outcome(0, 3, 2, 0.1, 0.2)]
)
def test_what_is_not_good(outcome: Outcome) -> None:
    """A late first token, slow tokens, and an answer that never ended."""
    assert not Goal(ttft_s=2.0, tpot_s=0.2).met(outcome)


def trace(*lengths: int) -> list[TraceRequest]:
    return [TraceRequest(tuple(range(40, 50 + i)), length, length) for i, length in enumerate(lengths)]


def test_replay_keeps_to_the_times_and_reads_every_token() -> None:
    """Answers have exactly the lengths of the trace; a request is sent at its time although another runs."""
    with serve() as live:
        live.lm.delay = 0.02
        first, second = replay(live.base, trace(40, 3), [0.0, 0.3], patience=20, salt="a")
        assert (first.tokens, second.tokens) == (40, 3)
        assert 0.7 < first.last < 5  # 40 forwards of 20 ms
        assert second.arrived == 0.3 < second.first < second.last < first.last
        assert live.metric("vllm:generation_tokens_total") == 43


def test_a_client_gives_up() -> None:
    """What has not ended by then is cut off, and the server works for it no longer."""
    with serve() as live:
        live.lm.delay = 0.02
        done, cut = replay(live.base, trace(2, 500), [0.0, 0.0], patience=0.5, salt="a")
        live.wait_idle()
        assert done.finished
        assert not cut.finished
        assert 1 < cut.tokens < 60
        assert cut.first < 0.5 <= cut.last < 2


def test_salts_keep_runs_apart() -> None:
    """A second run must compute what the first has left in the prefix cache."""
    with serve() as live:
        for salt, cached in (("a", 0), ("b", 0), ("b", 8)):
            replay(live.base, trace(2), [0.0], patience=20, salt=salt)
            live.wait_idle()
            assert live.metric("vllm:prompt_tokens_cached_total") == cached


def test_refusals_are_one_line() -> None:
    """Of the server, and of a server that cannot start."""
    with serve(max_model_len=16) as live, pytest.raises(SixstageError, match=r"400.*maximum context length"):
        replay(live.base, [TraceRequest(tuple(range(40, 60)), 1, 1)], [0.0], patience=20, salt="a")
    with pytest.raises(SixstageError, match=r"ended with exit code 2.*no-such-model"), \
         server_process(*server_arguments(Job("5", "no-such-model"))):  # fmt: skip
        pass


def test_the_offline_process_does_the_same_work() -> None:
    """As many tokens as the trace wants, one job after another, and an error is told."""
    job = Job("5", "tiny-llama", "float32", num_requests=3, bound="exact", longest=6, kv_bytes=1 << 20,
              max_model_len=64, kernel="reference")  # fmt: skip
    with offline_process() as offline:
        for _ in range(2):
            found = offline(job)
            assert [one.tokens for one in found] == [item.output_len for item in job.trace(300)]
            assert all(one.arrived == 0 < one.first <= one.last < math.inf for one in found)
        with pytest.raises(SixstageError, match="kv_bytes"):
            offline(Job("5", "tiny-llama", kv_bytes=1))


def test_agents_call_and_find_their_beginnings_in_the_cache() -> None:
    """Every turn but the last is a call; a turn finds what the turn before has sent."""
    with serve() as live:
        found = run_agents(live.base, agents=2, turns=3, system_tokens=100)
        figures = agent_figures(found)
        live.wait_idle()
    assert sorted(figures) == ["1", "2", "3", "all"]
    assert [figures[turn]["requests"] for turn in ("1", "2", "3", "all")] == [2, 2, 2, 6]
    size = 4  # of a block
    by_agent = sorted(found[:3], key=lambda turn: turn.turn), sorted(found[3:], key=lambda turn: turn.turn)
    for turns in by_agent:
        for before, after in pairwise(turns):
            assert after.prompt_tokens > before.prompt_tokens + 10  # the call and its result
            assert after.cached_tokens >= before.prompt_tokens // size * size - size
    assert figures["all"]["cached_share"] == sum(t.cached_tokens for t in found) / sum(
        t.prompt_tokens for t in found
    )


def test_an_error_in_a_stream_is_raised() -> None:
    """It must not be taken for the end of an answer."""

    async def read(base: str) -> None:
        async for _ in events(base, "/v1/completions", body(trace(5)[0], "a")):
            pass

    with serve() as live:
        live.lm.failure = RuntimeError("broken on purpose")
        with pytest.raises(SixstageError):
            asyncio.run(read(live.base))


def test_a_stage_without_sharing_is_refused() -> None:
    """The agents need one."""
    with pytest.raises(InvalidValue, match="stages"):
        run(stages=[2], model="tiny-llama", quick=True)


@pytest.mark.slow
def test_the_whole_of_it(tmp_path, monkeypatch) -> None:
    """On a tiny model: the report is written, and its figures are those of the JSON."""
    small = Scale((2, 5), 3, 1, 4, 8, (0.3, 0.6), seconds=0.2, patience=10, agents=3, turns=3, system=100)
    monkeypatch.setattr(serve_bench, "QUICK", small)
    results = run(
        model="tiny-llama", dtype="float32", kernel="reference", kv_bytes=8 << 20, quick=True, out=tmp_path
    )
    assert list(results["curves"]) == ["stage2_kvcache", "stage5_prefix_sharing", "offline"]
    for curve in results["curves"].values():
        assert all(point["finished"] == point["requests"] >= 3 for point in curve)
    assert results["agents"]["all"]["requests"] == 9
    assert results["agents"]["3"]["cached_share"] > 0.5
    assert json.loads((tmp_path / "serve.json").read_text())["overhead"] == results["overhead"]
    page = (tmp_path / "serve.md").read_text()
    assert f"{results['agents']['all']['cached_share']:.1%}" in page
    assert (tmp_path / "serve-latency.svg").exists()
