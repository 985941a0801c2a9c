"""The scheduler alone, without a model or a tensor: who gets what in which step."""

from __future__ import annotations

import statistics
import time

import pytest
from desk import Desk
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidValue
from common.protocol import FinishReason
from common.sequence import Sequence


def test_finished_out_and_waiting_in_on_the_same_step():
    """The picture that everybody draws: A ends, C takes its place in the very next forward."""
    desk = Desk(max_num_seqs=2)
    desk.add("A", 3, answer=2), desk.add("B", 3, answer=5), desk.add("C", 3, answer=2)
    assert desk.step() == {"A": 3, "B": 3}
    assert desk.step() == {"A": 1, "B": 1}
    assert desk.step() == {"B": 1, "C": 3}
    assert desk.step() == {"B": 1, "C": 1}
    assert desk.step() == {"B": 1}
    assert desk.step() == {}


def test_prompt_in_chunks_beside_decodes():
    """Decodes advance at every step; the long prompt gets what the budget leaves."""
    desk = Desk(max_num_seqs=3, max_num_batched_tokens=8)
    desk.add("A", 3, answer=9)
    assert desk.step() == {"A": 3}
    desk.add("P", 20, answer=2)
    assert [desk.step() for _ in range(4)] == [
        {"A": 1, "P": 7},
        {"A": 1, "P": 7},
        {"A": 1, "P": 6},
        {"A": 1, "P": 1},
    ]


def test_chunks_take_blocks_only_as_they_come():
    """B01: last chunk of a prompt that fills its last block exactly, and one less and one more."""
    for prompt, held in ((7, [1, 2, 2, 3]), (8, [1, 2, 3, 3]), (9, [1, 2, 3, 3])):
        desk = Desk(max_num_seqs=4, max_num_batched_tokens=4)
        seq = desk.add("A", prompt, answer=9)
        got = []
        for _ in range(4):
            desk.step()
            got.append(len(seq.block_table))
        assert got == held


def test_a_hog_delays_a_newcomer_by_a_known_number_of_steps():
    """B50: budget 8, a prompt of 80 and one decode: 7 tokens of the prompt per step, so 12 steps."""
    desk = Desk(max_num_batched_tokens=8)
    desk.add("D", 1, answer=100)
    desk.step()
    desk.add("H", 80)
    desk.step()
    desk.add("N", 3)
    waited = 1
    while "N" not in (got := desk.step()):
        assert got["D"] == 1, "decode advances every step"
        waited += 1
    assert waited <= 12


def test_preemption_takes_the_youngest_and_admits_nobody():
    """Four blocks of four: A and B fill them, and A's next token needs one more."""
    desk = Desk(num_blocks=4, max_num_seqs=4, watermark=0.0)
    a, b = desk.add("A", 8, answer=8), desk.add("B", 3, answer=12)
    desk.step()
    c = desk.add("C", 1)
    while not desk.scheduler.num_preemptions:
        got = desk.step()
    assert b.counters.preemptions + c.counters.preemptions == desk.scheduler.num_preemptions
    assert a.counters.preemptions == 0
    assert set(got) <= {"A", "B"}
    assert desk.scheduler.running[0] is a
    assert desk.names(desk.scheduler.sequences()) in ("ABC", "AB", "ACB")


def test_the_preempted_stands_before_all_that_came_later():
    """Its rank is its arrival, and it resumes with prompt and answer alike (B40)."""
    desk = Desk(num_blocks=4, max_num_seqs=4)
    desk.add("A", 8, answer=6)
    b = desk.add("B", 4, answer=9)
    desk.step()
    desk.add("C", 1, answer=1)
    while b.counters.preemptions == 0:
        desk.step()
    known = len(b.token_ids)
    assert b.num_computed_tokens == 0
    assert b.block_table == []
    assert desk.names(desk.scheduler.sequences()) == "ABC"
    while "B" not in (got := desk.step()):
        assert "C" not in got, "nobody overtakes the head of the queue"
    assert got["B"] == known


def test_nobody_overtakes_a_head_that_does_not_fit():
    """B49: strict order; room behind a blocked head stays unused, so the head starts when it fits."""
    desk = Desk(num_blocks=8, max_num_seqs=8, watermark=0.0)
    desk.add("R", 18, answer=3)
    desk.step()
    desk.add("H", 15, answer=1)
    for i in range(20):
        desk.add(f"s{i}", 2, answer=1)
    started = []
    for _ in range(8):
        started += [name for name in desk.step() if name not in started]
    assert started[:3] == ["R", "H", "s0"]


def test_watermark_keeps_blocks_for_those_who_run():
    """Let in only what leaves a share of the pool free, unless nobody runs."""
    desk = Desk(num_blocks=10, watermark=0.3)
    desk.add("A", 16), desk.add("B", 12), desk.add("C", 8)
    assert desk.step() == {"A": 16, "B": 12}
    alone = Desk(num_blocks=10, watermark=0.3)
    alone.add("A", 40)
    assert alone.step() == {"A": 40}


def test_blocks_promised_to_a_running_prompt_are_not_given_away():
    """A long prompt in chunks holds few blocks yet; admission counts those it will come for."""
    desk = Desk(num_blocks=10, max_num_batched_tokens=16, max_num_seqs=4, watermark=0.0)
    desk.add("P", 30, answer=1), desk.add("Q", 12, answer=1)
    while desk.scheduler.sequences():
        desk.step()
    assert desk.scheduler.num_preemptions == 0


def test_priority_policy():
    """The smaller number enters first and is the last to lose its blocks; equals by arrival."""
    desk = Desk(max_num_seqs=2, policy="priority")
    for name, priority in (("a", 5), ("b", 1), ("c", 5), ("d", -3)):
        desk.add(name, 2, answer=3, priority=priority)
    assert list(desk.step()) == ["d", "b"]
    tight = Desk(num_blocks=4, max_num_seqs=3, policy="priority", watermark=0.0)
    low = tight.add("low", 6, answer=9, priority=9)
    tight.step()
    tight.add("high", 4, answer=9, priority=0)
    while not tight.scheduler.num_preemptions:
        tight.step()
    assert low.counters.preemptions == 1


def test_budget_below_the_batch_is_refused():
    """Otherwise some running sequence would gain nothing in a step."""
    with pytest.raises(InvalidValue, match=r"max_num_batched_tokens: got 7, .*max_num_seqs=8"):
        Desk(max_num_batched_tokens=7)


def test_alone_it_always_fits_and_ends_at_the_pool():
    """B04, B46: no sequence preempts itself; it ends when it has filled the pool."""
    desk = Desk(num_blocks=8, block_size=16)
    seq = desk.add("A", 100, answer=100)
    while not seq.finished:
        desk.step()
    assert (len(seq.token_ids), desk.scheduler.num_preemptions) == (129, 0)


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 15), st.integers(0, 12)), max_size=14),
    num_blocks=st.integers(8, 20),
    seats=st.integers(1, 5),
    budget=st.integers(5, 40),
)
def test_nobody_starves(requests, num_blocks, seats, budget):
    """Every request ends within as many steps as there are tokens in it and in all before it.

    The oldest live sequence is never a victim and gains a token per step, so it ends within its own length
    once it is the oldest; before that, the same holds for those in front of it.
    """
    desk = Desk(num_blocks, max_num_seqs=seats, max_num_batched_tokens=budget)
    arriving = sorted(((at, i) for i, (_, _, at) in enumerate(requests)))
    live: list[tuple[Sequence, int]] = []
    bound = 0
    while arriving or live:
        while arriving and arriving[0][0] <= desk.steps:
            prompt, answer, _ = requests[arriving.pop(0)[1]]
            bound = max(bound, desk.steps) + prompt + answer
            live.append((desk.add(str(len(live)), prompt, answer), bound))
        got = desk.step()
        assert sum(got.values()) <= budget
        assert len(got) <= seats
        held = [block for seq, _ in live for block in seq.block_table]
        assert sorted(held + desk.blocks.pool.free_blocks) == list(range(num_blocks))
        assert all(desk.steps <= limit for seq, limit in live if not seq.finished)
        assert got or not live or all(seq.finished for seq, _ in live)
        live = [(seq, limit) for seq, limit in live if not seq.finished]
    assert desk.blocks.pool.num_free == num_blocks
    assert desk.scheduler.ranks == {}


@pytest.mark.timing
def test_cost_of_a_step():
    """1,000 running and 10,000 waiting: under 2 ms a step (the median of many, the machine is shared)."""
    desk = Desk(num_blocks=20_000, block_size=16, max_num_seqs=1000, max_num_batched_tokens=200_000)
    for i in range(11_000):
        desk.add(str(i), 100, answer=1000)
    desk.step()
    assert len(desk.scheduler.running) == 1000
    taken = []
    for _ in range(30):
        begin = time.perf_counter()
        scheduled = desk.scheduler.schedule()
        desk.scheduler.release_finished()
        taken.append(time.perf_counter() - begin)
        for seq, num_new in scheduled:
            seq.num_computed_tokens += num_new
            seq.token_ids.append(1)
    assert len(scheduled) == 1000
    assert statistics.median(taken) < 0.002


def test_what_is_taken_back_leaves_the_rest_in_order():
    """Waiting ones go from the middle of the queue: the next in is still the best rank, and nothing is kept."""
    desk = Desk(max_num_seqs=1, policy="priority")
    seqs = {p: desk.add(str(p), 2, answer=1, priority=p) for p in (0, 5, 1, 6, 7, 2, 3)}
    for priority in (0, 1):
        seqs[priority].finish_reason = FinishReason.ABORT
    desk.scheduler.drop_aborted()
    assert desk.names(desk.scheduler.sequences()) == "23567"
    assert desk.scheduler.ranks.keys() == {seqs[p] for p in (2, 3, 5, 6, 7)}
    assert [list(desk.step()) for _ in range(6)] == [["2"], ["3"], ["5"], ["6"], ["7"], []]
    assert desk.scheduler.ranks == {}


def test_a_resumed_sequence_runs_before_those_that_came_later():
    """Under "priority" the better rank is let in later and runs first: it keeps its blocks, the other does not."""
    desk = Desk(num_blocks=6, max_num_seqs=3, policy="priority", watermark=0.0)
    low = desk.add("low", 4, answer=12, priority=9)
    desk.step()
    high = desk.add("high", 4, answer=12, priority=0)
    desk.step()
    assert desk.scheduler.running == [high, low]
    while not (low.finished and high.finished):
        desk.step()
    assert high.counters.preemptions == 0
    assert low.counters.preemptions == 1


def test_a_block_to_grow_into_stays_free_under_any_watermark():
    """Of 4 blocks A takes 2: B, which would take the other two, waits, since A is about to need one."""
    desk = Desk(num_blocks=4, watermark=0.0)
    desk.add("A", 8, answer=2), desk.add("B", 8, answer=2)
    assert desk.step() == {"A": 8}
    fits = Desk(num_blocks=5, watermark=0.0)
    fits.add("A", 8, answer=2), fits.add("B", 8, answer=2)
    assert fits.step() == {"A": 8, "B": 8}


def test_nobody_is_let_in_by_a_step_that_took_blocks_away():
    """A takes one of the victim's four blocks; W, of a better rank, would fit into the rest, and waits a step."""
    desk = Desk(num_blocks=8, max_num_seqs=4, policy="priority", watermark=0.0)
    desk.add("A", 7, answer=9, priority=1), desk.add("D", 4, answer=9, priority=2)
    victim = desk.add("V", 13, answer=9, priority=9)
    assert desk.step() == {"A": 7, "D": 4, "V": 13}
    desk.add("W", 8, answer=1, priority=0)
    assert desk.step() == {"A": 1, "D": 1, "V": 1}
    assert desk.step() == {"A": 1, "D": 1}
    assert (victim.counters.preemptions, desk.blocks.pool.num_free) == (1, 3)
    assert desk.step() == {"A": 1, "D": 1, "W": 8}
