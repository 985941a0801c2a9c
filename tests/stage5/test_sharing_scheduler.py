"""The scheduler of stage 5 alone: what a hit is worth at admission, where forks go, what a step costs."""

from __future__ import annotations

import statistics
import time
from hashlib import sha256

import pytest
from provenance import Memory, check_tables

from common.config import EngineConfig
from common.protocol import FinishReason, Request
from common.sampling_params import SamplingParams
from common.sequence import Sequence
from stage5_prefix_sharing import block_tables
from stage5_prefix_sharing.block_tables import SharingTables
from stage5_prefix_sharing.scheduler import Scheduler


class Desk:
    """A scheduler and the world around it: what was scheduled counts as computed, a token follows."""

    def __init__(self, num_blocks: int = 64, block_size: int = 4, **options: object) -> None:
        settings: dict = {"max_model_len": 10_000, "max_num_seqs": 8, "max_num_batched_tokens": 64} | options
        config = EngineConfig(kv_bytes=num_blocks * block_size, block_size=block_size, **settings)
        self.blocks = SharingTables(config, bytes_per_token=1)
        self.scheduler = Scheduler(config, self.blocks)
        self.memory = Memory(self.blocks)

    def add(self, name: str, prompt: int, answer: int = 4, n: int = 1, priority: int = 0) -> list[Sequence]:
        """A request; names that begin alike have prompts that begin alike."""
        ids = (ord(name[0]), *range(1, prompt))
        params = SamplingParams(max_tokens=answer, n=n)
        request = Request(name, ids, params, priority=priority)
        seqs = [Sequence(request, index) for index in range(n)]
        for seq in seqs:
            self.scheduler.add(seq, None if seq is seqs[0] else seqs[0])
        return seqs

    def step(self) -> dict[str, int]:
        """One step: name and index -> tokens computed."""
        scheduled = self.scheduler.schedule()
        self.memory.copy(self.blocks.take_copies())
        for i, (seq, num_new) in enumerate(scheduled):
            followers = [s for s, n in scheduled[i + 1 :] if n == 0 and s.request is seq.request]
            self.memory.write(seq, num_new, followers)
            self.memory.read(seq, seq.num_computed_tokens + num_new)
            seq.num_computed_tokens += num_new
            seq.counters.forwards += 1
            if seq.num_computed_tokens == len(seq.token_ids):
                seq.token_ids.append(seq.index)
                if seq.num_output_tokens == seq.params.max_tokens:
                    seq.finish_reason = FinishReason.LENGTH
        self.blocks.publish(scheduled)
        self.scheduler.release_finished()
        check_tables(self.blocks, self.scheduler.sequences())
        self.memory.poison_free_blocks()
        return {f"{seq.request_id}{seq.index}": num_new for seq, num_new in scheduled}


def test_held_hits_cost_nothing_and_free_hits_their_blocks():
    """Pool of 8, A runs with 4 of them: A's twin needs 1 block more; a text that lies free needs all of its own."""
    desk = Desk(num_blocks=8, watermark=0.0)
    desk.add("A", 15, answer=9)
    desk.step()
    desk.add("Atwin", 14, answer=1)
    assert desk.step() == {"A0": 1, "Atwin0": 2}
    for room, enters in ((5, True), (4, False)):
        desk = Desk(num_blocks=4 + room, watermark=0.0)
        desk.add("F", 16, answer=1)
        assert desk.step() == {"F0": 16}
        desk.add("A", 15, answer=9)
        desk.step()
        desk.add("Flater", 16, answer=1)
        assert ("Flater0" in desk.step()) == enters


def test_nobody_computes_what_another_computes_in_the_same_step():
    """Twins wait for the first of them, and everyone behind them with them; all enter together one step later."""
    desk = Desk()
    for name, length in (("A", 15), ("Atwin", 14), ("B", 9), ("Athird", 10)):
        desk.add(name, length)
    assert desk.step() == {"A0": 15}
    assert desk.step() == {"A0": 1, "Atwin0": 2, "B0": 9, "Athird0": 2}


def test_a_prompt_in_chunks_is_waited_for_to_its_end():
    """A twin does not follow chunk by chunk, computing what is left of each: it enters when all can be found."""
    desk = Desk(max_num_batched_tokens=8)
    desk.add("A", 21)
    desk.add("Atwin", 21)
    assert [desk.step() for _ in range(4)] == [{"A0": 8}, {"A0": 8}, {"A0": 5}, {"A0": 1, "Atwin0": 1}]


@pytest.mark.parametrize("options", [{"enable_prefix_caching": False}, {}])
def test_who_could_not_find_it_anyway_does_not_wait(options):
    """Without a cache, or with too little in common to share a whole block."""
    desk = Desk(**options)
    desk.add("A", 15 if options else 4)
    desk.add("Atwin", 15 if options else 4)
    assert len(desk.step()) == 2


def test_a_hit_leaves_budget_for_others():
    """Only what is computed counts: 8 of P = 9 are found, so P = 63 fits beside it."""
    desk = Desk()
    desk.add("A", 9, answer=1)
    desk.step()
    desk.add("A", 9, answer=1), desk.add("B", 63, answer=1)
    assert desk.step() == {"A0": 1, "B0": 63}


def test_forks_stand_behind_their_leader():
    """Between two other requests, in the batch and in the running order; P in chunks beside a decode."""
    desk = Desk(max_num_batched_tokens=8)
    desk.add("A", 3, answer=9), desk.add("B", 9, n=3), desk.add("C", 2)
    assert list(desk.step().items()) == [("A0", 3), ("B0", 5)]
    assert list(desk.step().items()) == [("A0", 1), ("B0", 4), ("B1", 0), ("B2", 0), ("C0", 2)]
    assert list(desk.step().items()) == [("A0", 1), ("B0", 1), ("B1", 1), ("B2", 1), ("C0", 1)]


def test_no_step_has_more_sequences_than_places():
    """Five answers and four places, one taken: two are forked, two wait in order, before a later request."""
    desk = Desk(max_num_seqs=4)
    desk.add("A", 3, answer=2), desk.add("B", 9, answer=3, n=5), desk.add("C", 2)
    assert list(desk.step().items()) == [("A0", 3), ("B0", 9), ("B1", 0), ("B2", 0)]
    assert [seq.index for seq in desk.scheduler.sequences() if seq.request_id == "B"] == [0, 1, 2, 3, 4]
    assert list(desk.step()) == ["A0", "B0", "B1", "B2"]
    assert desk.step() == {"B0": 1, "B1": 1, "B2": 1, "B3": 1}
    assert list(desk.step()) == ["B3", "B4", "C0"]


def test_victims_that_hold_nothing_alone():
    """Two go until one is the only owner of the tail and may write it in place; the oldest always gets on."""
    desk = Desk(num_blocks=4, watermark=0.0)
    [a] = desk.add("A", 4, answer=12)
    b, c, d = desk.add("B", 6, answer=3, n=3)
    assert desk.step() == {"A0": 4, "B0": 6, "B1": 0, "B2": 0}
    assert desk.step() == {"A0": 1, "B0": 1}
    assert [seq.counters.preemptions for seq in (a, b, c, d)] == [0, 0, 1, 1]
    assert desk.blocks.pool.counters.copies == 0
    while desk.scheduler.sequences():
        desk.step()
    assert a.counters.preemptions == 0
    assert desk.blocks.pool.num_free == 4


@pytest.mark.timing
@pytest.mark.parametrize("shared", [True, False])
def test_cost_of_a_step(shared):
    """1,000 running and 10,000 waiting: under 2 ms a step (the median of many, the machine is shared)."""
    desk = Desk(num_blocks=20_000, block_size=16, max_num_seqs=1000, max_num_batched_tokens=200_000)
    for i in range(11_000):
        prompt = (0 if shared else i, *range(1, 100))
        desk.scheduler.add(Sequence(Request(str(i), prompt, SamplingParams(max_tokens=1000))))
    taken = []
    for _ in range(30):
        begin = time.perf_counter()
        scheduled = desk.scheduler.schedule()
        desk.scheduler.release_finished()
        taken.append(time.perf_counter() - begin)
        for seq, num_new in scheduled:
            seq.num_computed_tokens += num_new
            seq.token_ids.append(1)
        desk.blocks.publish(scheduled)
    assert len(scheduled) == 1000
    assert statistics.median(taken) < 0.002


def test_each_block_is_hashed_once(monkeypatch):
    """However often a waiting head is looked at: one SHA-256 per full block of its text, and none in a decode."""
    hashed = []
    monkeypatch.setattr(
        block_tables,
        "block_hash",
        lambda parent, ids: hashed.append(1) or sha256(parent + bytes(ids)).digest(),
    )
    desk = Desk(num_blocks=12, watermark=0.0)
    desk.add("A", 41, answer=8)
    desk.step()
    assert len(hashed) == 10
    desk.add("B", 33)
    counts = []
    for _ in range(4):
        desk.step()
        counts.append(len(hashed))
    assert counts == [11, 11, 12, 12], "B misses with its first block, and A fills its 11th in the third step"
