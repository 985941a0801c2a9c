"""The split of KV memory, on hand-made records whose answers can be counted on paper, and on real engines."""

from dataclasses import replace

import pytest
from support.counting import counting_engine

from common.batch import Scheduled
from common.bench.memory import Split, head_fits, largest_gap, mean_split, split_steps
from common.bench.record import Computed, Recorder, Run, StepRecord
from common.protocol import EngineStats, KVUsage, Request, Span
from common.sampling_params import SamplingParams

CAPACITY = 100


def step(parts, spans, *, waiting=0, head_fits=None, finished=()) -> StepRecord:
    """`parts`: (request, tokens computed, tokens after); `spans`: (request, start, reserved, used before)."""
    reserved = sum(span[2] for span in spans)
    return StepRecord(
        seconds=0.0,
        computed=tuple(Computed(name, 0, new, context) for name, new, context in parts),
        usage=KVUsage(CAPACITY, reserved, sum(span[3] for span in spans), bytes_per_token=1),
        spans=tuple(Span(name, 0, start, size, used) for name, start, size, used in spans),
        waiting=waiting,
        head_fits=head_fits,
        finished=tuple((name, 0) for name in finished),
    )


def a_run(*steps: StepRecord) -> Run:
    return Run(steps=list(steps), stats=EngineStats(), max_num_seqs=4)


def test_contiguous_reservations() -> None:
    """A: prompt 10, reserves 40, ends at 12.  B: prompt 5, reserves 30, ends at 6 and stays in the batch."""
    run = a_run(
        step([("A", 10, 10), ("B", 5, 5)], [("A", 0, 40, 0), ("B", 40, 30, 0)], waiting=1, head_fits=False),
        step([("A", 1, 11), ("B", 1, 6)], [("A", 0, 40, 10), ("B", 40, 30, 5)], waiting=1, head_fits=True,
             finished=["B"]),
        step([("A", 1, 12)], [("A", 0, 40, 11), ("B", 40, 30, 6)], finished=["A"]),
    )  # fmt: skip
    assert split_steps(run) == {
        # 15 stored; A will store 2 more and B 1 more; 28 + 24 never; 30 free, of no use to who waits
        0: Split(15, 3, 52, 30, 0),
        # A will store 1 more; the head would fit but the batch is closed: rest
        1: Split(17, 1, 52, 0, 30),
        # B has ended: its 30 slots are of no use to anybody
        2: Split(12, 0, 58, 0, 30),
    }


def test_mean_over_loaded_forwards_only() -> None:
    run = a_run(
        step([("A", 10, 10)], [("A", 0, 40, 0)], waiting=1, head_fits=False),
        step([("A", 1, 11)], [("A", 0, 40, 10)], finished=["A"]),
    )
    assert mean_split(run) == Split(10, 1, 29, 60, 0)
    assert mean_split(run, loaded=False) == Split(10.5, 0.5, 29, 30, 30)
    assert mean_split(run).share == Split(0.10, 0.01, 0.29, 0.60, 0.0)
    assert mean_split(run).efficiency == pytest.approx(10 / 40)


def test_paged_blocks_and_a_preemption() -> None:
    """A in blocks of 4 loses its memory at 6 tokens and comes back: what it stores then was not reserved."""
    run = a_run(
        step([("A", 5, 5)], [("A", 0, 4, 0), ("A", 8, 4, 0)]),
        step([("A", 1, 6)], [("A", 0, 4, 4), ("A", 8, 4, 1)]),
        step([("B", 4, 4)], [("B", 0, 4, 0)], waiting=1, head_fits=False),
        step([("A", 7, 7)], [("A", 4, 4, 0), ("A", 8, 4, 0)], finished=["B"]),
        step([("A", 1, 8)], [("A", 4, 4, 4), ("A", 8, 4, 3)], finished=["A"]),
    )
    assert split_steps(run) == {
        0: Split(5, 1, 2, 0, 92),  # up to 6 before it is interrupted
        1: Split(6, 0, 2, 0, 92),
        2: Split(4, 0, 0, 96, 0),
        3: Split(7, 1, 0, 0, 92),
        4: Split(8, 0, 0, 0, 92),
    }


def test_forwards_without_a_look_still_tell_the_future() -> None:
    run = a_run(
        step([("A", 10, 10)], [("A", 0, 40, 0)]),
        step([("A", 1, 11)], []),
        step([("A", 1, 12)], [], finished=["A"]),
    )
    assert split_steps(run) == {0: Split(10, 2, 28, 0, 60)}


def test_no_memory_no_split() -> None:
    assert mean_split(a_run(step([("A", 3, 3)], []))) is None


def test_largest_gap() -> None:
    spans = [Span("A", 0, 10, 20, 0), Span("B", 0, 45, 5, 0)]
    assert largest_gap(spans, 60) == 15
    assert largest_gap(spans, 50) == 15
    assert largest_gap(spans[:1], 60) == 30
    assert largest_gap([], 60) == 60


class SpyExecutor:
    """Counts K/V slots behind the engine's back: tokens stored for each unfinished sequence."""

    def __init__(self, inner) -> None:
        self.inner, self.stored = inner, []

    def execute(self, scheduled: Scheduled):
        self.stored.append(sum(seq.num_computed_tokens + n for seq, n in scheduled))
        return self.inner.execute(scheduled)


def test_splits_of_a_real_run_add_up(stage: str) -> None:
    """Whatever the stage: parts are not negative, add up to the capacity, and token states are what it holds."""
    engine, requests = counting_engine(stage, [(9, 4), (3, 12), (5, 1), (8, 7), (2, 2), (6, 9)], kv_tokens=64)
    spy = SpyExecutor(engine.executor)
    engine.executor = spy
    run = Recorder(engine).run(requests)
    splits = split_steps(run)
    if stage == "stage1_naive":
        assert splits == {}
        return
    assert list(splits) == list(range(len(run.steps)))
    for number, split in splits.items():
        assert min(split.token_states, split.reservation, split.internal, split.external, split.rest) >= 0
        assert split.total == run.steps[number].usage.capacity
        if not engine.capabilities.chunks_prompts:  # there, a member may sit a forward out
            assert split.token_states == spy.stored[number]


class SlotSpy:
    """Knows by block tables alone which slots hold a token after each forward, each slot once."""

    def __init__(self, engine) -> None:
        self.engine, self.inner, self.filled = engine, engine.executor, []

    def execute(self, scheduled: Scheduled):
        size, new = self.engine.config.block_size, {id(seq): n for seq, n in scheduled}
        self.filled.append({
            seq.block_table[i // size] * size + i % size
            for seq in self.engine.sequences() if seq.block_table
            for i in range(seq.num_computed_tokens + new.get(id(seq), 0))
        })  # fmt: skip
        return self.inner.execute(scheduled)


@pytest.mark.parametrize(("n", "kv_tokens"), [(1, 44), (3, 76)])
def test_a_shared_block_counts_once(n: int, kv_tokens: int) -> None:
    """Prompts with a common beginning, parallel answers, a pool so small that some lose their memory."""
    engine, requests = counting_engine(
        "stage5_prefix_sharing",
        [(9, 6), (14, 12), (9, 3), (19, 7), (14, 9)],
        kv_tokens=kv_tokens,
        max_num_seqs=9,
    )
    spy = engine.executor = SlotSpy(engine)
    requests = [replace(request, params=replace(request.params, n=n)) for request in requests]
    run = Recorder(engine).run(requests)
    splits = split_steps(run)
    shared = 0
    for number, split in splits.items():
        step = run.steps[number]
        assert split.token_states == len(spy.filled[number])
        assert split.allocated == step.usage.reserved
        assert min(split.reservation, split.internal, split.external, split.rest) >= 0
        assert split.total == step.usage.capacity
        shared += sum(part.context for part in step.computed) > split.token_states
    assert shared, "nothing was shared: no test"
    assert engine.stats.preemptions, "nobody lost memory: no test"


def test_a_fork_reserves_only_what_it_will_write() -> None:
    """Prompt 6 in blocks of 4, two answers of 3: forwards store 6, then 2 + 4 (one copies 2), then 2 more."""
    engine, requests = counting_engine("stage5_prefix_sharing", [(6, 3)], kv_tokens=40)
    run = Recorder(engine).run([replace(requests[0], params=replace(requests[0].params, n=2))])
    assert [(s.token_states, s.reservation, s.internal, s.rest) for s in split_steps(run).values()] == [
        (6, 2, 0, 32),
        (10, 2, 0, 28),
        (12, 0, 0, 28),
    ]


def look(stage: str, places: int, kv_tokens: int, running: list[int], head: int) -> tuple[bool, bool]:
    """Some prompts, and once they run (static batches: with them) one more: did it get in, would it fit?"""
    engine, requests = counting_engine(
        stage, [(n, 9) for n in (*running, head)], kv_tokens=kv_tokens, max_num_seqs=places, watermark=0.15
    )
    found: list[tuple[bool, bool]] = []

    class Look:
        inner = engine.executor

        def execute(self, scheduled: Scheduled):
            [seq] = engine.live.get(requests[-1].request_id, [None])
            if seq is not None:
                fits = head_fits(engine, seq, engine.kv.spans())
                found.append((any(one is seq for one, _ in scheduled), fits))
            return self.inner.execute(scheduled)

    engine.executor = Look()
    for request in requests[:-1]:
        engine.add_request(request)
    while engine.capabilities.continuous and not all(seq.block_table for seq in engine.sequences()):
        engine.step()
    engine.add_request(requests[-1])
    engine.step()
    return found[0]


@pytest.mark.parametrize("running", [[5], [8, 9, 13]])
@pytest.mark.parametrize("head", [3, 12, 17])
def test_head_fits_is_what_the_stage_would_do(stage: str, running: list[int], head: int) -> None:
    """With a place to spare the stage lets the head in exactly where, without one, it is said to fit.

    Memory grows from what just takes those who run to what takes everybody.
    """
    if stage == "stage1_naive":
        pytest.skip("keeps no K/V")
    each = 16 if stage == "stage2_kvcache" else 0  # a contiguous reservation is for prompt and answer
    least = max(sum(-(-n // 4) * 4 + each for n in running), head + each)
    answers = []
    for kv_tokens in range(least + 8, least + 60, 4):
        entered, _ = look(stage, 4, kv_tokens, running, head)
        _, fits = look(stage, len(running), kv_tokens, running, head)
        assert fits == entered, kv_tokens
        answers.append(fits)
    assert answers == sorted(answers)
    assert answers[-1]


def test_true_length_reservations_have_no_waste_but_the_dead() -> None:
    """With max_tokens = true length and one request at a time, nothing is ever reserved in vain but one slot.

    (The last token of an answer is never computed, so its slot is never used.)
    """
    engine, _ = counting_engine("stage2_kvcache", [(9, 6)], kv_tokens=64)
    params = SamplingParams(temperature=0.0, max_tokens=6)
    run = Recorder(engine).run([Request("0", (5,) * 9, params)])
    assert [(s.token_states, s.reservation, s.internal) for s in split_steps(run).values()] == [
        (9 + i, 5 - i, 1) for i in range(6)
    ]
