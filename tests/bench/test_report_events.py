"""What a page steps through says, forward by forward, what the recorder saw."""

from __future__ import annotations

import json

import pytest
from support.counting import counting_engine

from common.bench import report_events
from common.bench.record import Recorder, Run
from common.bench.report_events import events

LENGTHS = [(9, 4), (3, 12), (5, 1), (8, 7), (2, 2), (6, 9), (4, 14), (7, 3)]


def record(stage: str, kv_tokens: int = 64) -> Run:
    """A run in which requests wait for memory, and paged stages preempt."""
    engine, requests = counting_engine(stage, LENGTHS, kv_tokens)
    return Recorder(engine).run(requests)


def test_memory_at_every_forward(stage: str) -> None:
    """The stays, unfolded by what the docstring says, are the recorded spans; of ended requests nothing is live."""
    run = record(stage)
    found = json.loads(json.dumps(events(run)))
    ended = {key: at for at, step in enumerate(run.steps) for key in step.finished}
    for at, step in enumerate(run.steps):
        held = set()
        for who, start, first, last, pieces in found["stays"]:
            if first <= at <= last:
                begin, used, growth, reserved = [piece for piece in pieces if piece[0] <= at][-1]
                held.add((found["who"][who][0], start, used + growth * (at - begin), reserved))
        assert held == {
            (s.request_id, s.start, s.used if ended.get((s.request_id, s.index), at) >= at else 0, s.reserved)
            for s in step.spans
        }
        assert found["live"][at] == sum(used for _, _, used, _ in held)
    assert found["reserved"] == [step.usage.reserved for step in run.steps]
    assert found["waiting"] == [step.waiting for step in run.steps]


def test_batch_at_every_forward(stage: str) -> None:
    """Seats hold who computed how many tokens; nobody shares a row; a sequence keeps its row while it stays."""
    run = record(stage)
    found = events(run)
    for at, step in enumerate(run.steps):
        seats = [seat for seat in found["seats"] if seat[2] <= at <= seat[3]]
        assert {(found["who"][who][0], tokens) for who, _, _, _, tokens in seats} == {
            (part.request_id, part.num_new) for part in step.computed
        }
        rows = [row for _, row, _, _, _ in seats]
        assert len(set(rows)) == len(rows) == len(step.computed)
        assert all(0 <= row < found["places"] == 4 for row in rows)
    for who, row, _, last, _ in found["seats"]:
        follows = [seat[1] for seat in found["seats"] if seat[0] == who and seat[2] == last + 1]
        assert set(follows) <= {row}


def test_ends_and_colours() -> None:
    run = record("stage4_continuous")
    found = events(run)
    assert sorted(found["who"][who][0] for _, who in found["ends"]) == sorted(
        str(i) for i in range(len(LENGTHS))
    )
    assert all((found["who"][who][0], 0) in run.steps[at].finished for at, who in found["ends"])
    assert all(int(name) == number for name, number in found["who"]), "numbered in order of arrival"


def test_decoding_is_written_in_few_pieces() -> None:
    """A stretch that grows by a token per forward takes two: the prompt, then the growth."""
    engine, requests = counting_engine("stage2_kvcache", [(9, 12)], 64)
    [stay] = events(Recorder(engine).run(requests))["stays"]
    assert stay == [0, 0, 0, 11, [[0, 0, 9, 25], [2, 10, 1, 25]]]


def test_a_long_run_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_events, "MOST_FORWARDS", 5)
    run = record("stage3_paged")
    found = events(run)
    assert len(found["seconds"]) == len(found["live"]) == 5
    assert found["total"] == len(run.steps) > 5
    assert max(seat[3] for seat in found["seats"]) == 4


def test_nothing_happened() -> None:
    engine, _ = counting_engine("stage1_naive", [(1, 1)])
    found = events(Recorder(engine).run([]))
    assert (found["total"], found["capacity"], found["seats"], found["stays"]) == (0, 0, [], [])
