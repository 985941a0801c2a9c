"""What a recorder writes down, and the figures made of it, against counts done by hand."""

from itertools import pairwise

import pytest
from support.counting import CONFIG, counting_engine

from common.bench.metrics import percentiles, summarise
from common.bench.record import Recorder
from common.bench.scripted import CountingExecutor, ScriptedLengths
from common.protocol import FinishReason, SampledToken

LENGTHS = [(9, 4), (3, 12), (5, 1), (8, 7), (2, 2), (6, 9)]


class Clock:
    """One second per look."""

    def __init__(self) -> None:
        self.now = -1.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_answers_end_where_the_script_says(stage: str) -> None:
    engine, requests = counting_engine(stage, LENGTHS, kv_tokens=96)
    run = Recorder(engine).run(requests)
    assert {int(key[0]): len(tokens) for key, tokens in run.token_ids.items()} == {
        i: output for i, (_, output) in enumerate(LENGTHS)
    }
    assert set(run.finish_reasons.values()) == {FinishReason.STOP}
    assert all(tokens[-1] == 2 and 2 not in tokens[:-1] for tokens in run.token_ids.values())


def test_records_agree_with_the_engines_counters(stage: str) -> None:
    engine, requests = counting_engine(stage, LENGTHS, kv_tokens=64)
    run = Recorder(engine).run(requests)
    stats = engine.stats
    assert len(run.steps) == stats.forwards
    assert sum(part.num_new for step in run.steps for part in step.computed) == stats.tokens_computed
    assert sum(len(step.emitted) for step in run.steps) == stats.tokens_emitted == 35
    assert sum(len(step.finished) for step in run.steps) == stats.sequences_finished == len(LENGTHS)
    assert stats.idle_slot_steps == sum(4 - len(step.computed) for step in run.steps)
    assert all(a.seconds <= b.seconds for a, b in pairwise(run.steps))


def test_memory_is_seen_while_the_forward_holds_it() -> None:
    """Between two steps a batch that has just ended would have vanished: its last forward shows it."""
    engine, requests = counting_engine("stage2_kvcache", [(9, 2), (3, 1)], kv_tokens=64)
    run = Recorder(engine).run(requests)
    assert [step.usage.reserved for step in run.steps] == [44, 44]
    assert [[(s.request_id, s.start, s.reserved, s.used) for s in step.spans] for step in run.steps] == [
        [("0", 0, 25, 0), ("1", 25, 19, 0)],
        [("0", 0, 25, 9), ("1", 25, 19, 3)],
    ]
    assert engine.kv.usage().reserved == 0


def test_who_waits_and_whether_it_would_fit() -> None:
    """Stage 2, reservations of 25, 19 and 30 slots in 64: the third waits for memory, then for nobody."""
    engine, requests = counting_engine("stage2_kvcache", [(9, 2), (3, 1), (14, 2)], kv_tokens=64)
    run = Recorder(engine).run(requests)
    assert [(step.waiting, step.head_fits) for step in run.steps] == [
        (1, False), (1, False), (0, None), (0, None)]  # fmt: skip


def test_a_closed_batch_is_no_lack_of_memory() -> None:
    engine, requests = counting_engine("stage2_kvcache", [(4, 2)] * 3, kv_tokens=64, max_num_seqs=2)
    run = Recorder(engine).run(requests)
    assert [(step.waiting, step.head_fits) for step in run.steps][:2] == [(1, True), (1, True)]


def test_looking_seldom() -> None:
    engine, requests = counting_engine("stage2_kvcache", [(4, 7)], kv_tokens=64)
    run = Recorder(engine, memory_every=3).run(requests)
    assert [bool(step.spans) for step in run.steps] == [True, False, False, True, False, False, True]
    engine, requests = counting_engine("stage2_kvcache", [(4, 7)], kv_tokens=64)
    run = Recorder(engine, memory_every=0).run(requests)
    assert not any(step.spans for step in run.steps)
    assert summarise(run)["kv"].keys() == {"capacity_bytes", "bytes_per_token", "reserved_bytes"}


def test_the_engine_gets_its_executor_back() -> None:
    engine, requests = counting_engine("stage1_naive", [(4, 2)])
    executor = engine.executor
    Recorder(engine).run(requests)
    assert engine.executor is executor

    class Broken:
        def execute(self, scheduled):
            raise RuntimeError("broken")

    engine, requests = counting_engine("stage1_naive", [(4, 2)])
    engine.executor = broken = Broken()
    with pytest.raises(RuntimeError, match="broken"):
        Recorder(engine).run(requests)
    assert engine.executor is broken


def test_times_by_hand() -> None:
    """One look at the clock when the run begins, one per step, one at the end; 2 requests, one at a time."""
    engine, requests = counting_engine("stage1_naive", [(4, 3), (2, 2)])
    run = Recorder(engine, clock=Clock()).run(requests)
    assert run.token_times == {("0", 0): [1.0, 2.0, 3.0], ("1", 0): [4.0, 5.0]}
    figures = summarise(run)
    assert figures["seconds"] == 6.0
    assert figures["output_tok_s"] == 5 / 6
    assert figures["total_tok_s"] == 11 / 6
    assert figures["ttft_s"]["mean"] == 2.5
    assert figures["ttft_s"]["p50"] == 2.5
    assert figures["tpot_s"]["mean"] == 1.0
    assert figures["computed_per_emitted"] == (4 + 5 + 6 + 2 + 3) / 5
    assert figures["running"] == {"peak": 1, "mean": 1.0}
    assert figures["occupancy"] == pytest.approx(1 / 4)
    assert figures["kv"] is None


def test_a_late_request_waits_from_its_arrival() -> None:
    engine, requests = counting_engine("stage1_naive", [(4, 2), (2, 1)])
    run = Recorder(engine).run(requests, arrivals=[0.0, 0.05])
    assert run.added == {"0": 0.0, "1": 0.05}
    assert run.token_times["0", 0][-1] < 0.05 <= run.token_times["1", 0][0]


def test_kv_figures_by_hand() -> None:
    """Reservations 25 + 19 of 64 slots at both forwards; live 12, then 10 (B ended with the first)."""
    engine, requests = counting_engine("stage2_kvcache", [(9, 2), (3, 1)], kv_tokens=64)
    kv = summarise(Recorder(engine).run(requests))["kv"]
    size = 64  # bytes: 2 x 1 layer x 1 head x 8 x 4
    assert kv["bytes_per_token"] == size
    assert kv["capacity_bytes"] == 64 * size
    assert kv["reserved_bytes"] == {"peak": 44 * size, "mean": 44 * size}
    assert kv["live_bytes"] == {"peak": 12 * size, "mean": 11 * size}
    assert kv["efficiency"] == pytest.approx(11 / 44)
    assert sum(kv["split"].values()) == pytest.approx(1.0)


def test_percentiles() -> None:
    assert percentiles([]) == {}
    found = percentiles([float(i) for i in range(101)])
    assert found == {"p50": 50.0, "p95": 95.0, "p99": 99.0, "mean": 50.0}


def test_an_end_that_comes_too_early_is_replaced() -> None:
    class Ends:
        def execute(self, scheduled):
            return [SampledToken(2) for _ in scheduled]

    engine, requests = counting_engine("stage2_kvcache", [(3, 3)])
    engine.executor = ScriptedLengths(Ends(), {"0": 3}, CONFIG)
    assert Recorder(engine).run(requests).token_ids == {("0", 0): [0, 0, 2]}


def test_no_token_for_an_unfinished_chunk() -> None:
    engine, requests = counting_engine("stage1_naive", [(6, 1)])
    engine.add_request(requests[0])
    [seq] = engine.sequences()
    script = ScriptedLengths(CountingExecutor(), {"0": 1}, CONFIG)
    assert script.execute([(seq, 4)]) == [None]
    assert script.execute([(seq, 6)]) == [SampledToken(2)]


def test_a_paged_head_needs_a_block_to_grow_into() -> None:
    """Five blocks of 4: A (8 tokens) takes two; B's 8 need two and a spare.  One batch, then the next."""
    fits = []
    for kv_tokens in (16, 20):
        engine, requests = counting_engine(
            "stage3_paged", [(8, 2), (8, 2)], kv_tokens=kv_tokens, max_num_seqs=1
        )
        fits.append(Recorder(engine).run(requests).steps[0].head_fits)
    assert fits == [False, True]
