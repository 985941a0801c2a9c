"""Random runs of add, step, abort, starvation and eviction: all invariants after each, all answers as alone."""

from __future__ import annotations

from functools import cache

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.engines import ask, build, run, tokens
from support.invariants import check_drained, check_memory, poison_free_memory
from tagged import TaggedModel

from common.protocol import Request, StepOutput

MODEL = TaggedModel()
PROMPTS = [(7,) * 4, (7,) * 8, (7,) * 9, (7,) * 13, (*[7] * 8, 3), (*[7] * 4, 5, 5, 5, 5, 5), (3, 7, 7), (5,)]
"""Beginnings of each other, with ends on both sides of a block's edge."""


@cache
def alone(prompt: tuple[int, ...], length: int, n: int, seed: int | None) -> list[list[int]]:
    """What a fresh stage 1 says to it: the answers in order."""
    said = run(build("stage1_naive", MODEL), [request("r", prompt, length, n, seed)])["r"]
    return [tokens(said, index) for index in range(n)]


def request(name: str, prompt: tuple[int, ...], length: int, n: int, seed: int | None, **more) -> Request:
    """Greedy without a seed; n > 1 answers differ with one."""
    sampling = {} if seed is None else {"temperature": 1.0, "seed": seed}
    plain = ask(name, prompt, max_tokens=length, n=n, **sampling)
    return Request(name, prompt, plain.params, **more)


class Runs(RuleBasedStateMachine):
    """An engine with little memory, and everything that can happen to its requests."""

    @initialize(
        num_blocks=st.integers(8, 24), block_size=st.sampled_from([2, 4]), seats=st.integers(1, 6),
        budget=st.sampled_from([6, 9, 64]), caching=st.booleans(), policy=st.sampled_from(["fcfs", "priority"]),
    )  # fmt: skip
    def begin(self, num_blocks, block_size, seats, budget, caching, policy) -> None:
        """All memory is poisoned before it is first written."""
        self.engine = build(
            "stage5_prefix_sharing", MODEL, kv_tokens=max(24, num_blocks * block_size), block_size=block_size,
            max_num_seqs=seats, max_num_batched_tokens=budget, enable_prefix_caching=caching, policy=policy,
            max_model_len=24, watermark=0.0,
        )  # fmt: skip
        self.said: dict[str, list[StepOutput]] = {}
        self.asked: dict[str, tuple] = {}
        self.aborted: set[tuple[str, int]] = set()
        self.settle([])

    def settle(self, outputs: list[StepOutput]) -> None:
        """Note what was said; everything must be in order, and nobody may read what nobody owns."""
        for output in outputs:
            assert (output.request_id, output.index) not in self.aborted
            self.said.setdefault(output.request_id, []).append(output)
        check_memory(self.engine)
        for seq in self.engine.sequences():
            MODEL.check_cache(self.engine, seq)
        poison_free_memory(self.engine)

    @rule(
        prompt=st.sampled_from(PROMPTS), length=st.integers(1, 9), n=st.integers(1, 4),
        seed=st.sampled_from([None, 1, 2]), salt=st.sampled_from([None, None, "a"]), priority=st.integers(0, 2),
    )  # fmt: skip
    def add(self, prompt, length, n, seed, salt, priority) -> None:
        """A request with up to four answers."""
        name = str(len(self.asked))
        self.asked[name] = (prompt, length, n, seed)
        self.engine.add_request(request(name, *self.asked[name], cache_salt=salt, priority=priority))
        self.settle([])

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        """Some steps."""
        for _ in range(steps):
            self.settle(self.engine.step())

    @precondition(lambda self: self.asked)
    @rule(back=st.integers(0, 3), index=st.sampled_from([None, None, 0, 1, 3]))
    def abort(self, back: int, index: int | None) -> None:
        """A request, or one of its answers."""
        name = str(max(0, len(self.asked) - 1 - back))
        outputs = self.engine.abort(name, index)
        self.settle(outputs)
        self.aborted |= {(name, output.index) for output in outputs}

    @rule(leave=st.integers(0, 2))
    def starve(self, leave: int) -> None:
        """A step in which hardly a block is free: whoever needs one takes it from the worst rank."""
        pool = self.engine.kv.blocks.pool
        hostages = pool.allocate(max(0, pool.num_free - leave))
        outputs = self.engine.step()
        pool.free(hostages)
        self.settle(outputs)

    @rule(count=st.integers(1, 24))
    def evict(self, count: int) -> None:
        """Somebody needed the blocks that were free longest."""
        pool = self.engine.kv.blocks.pool
        blocks = pool.allocate(min(count, pool.num_free))
        pool.free(blocks)
        self.settle([])

    def teardown(self) -> None:
        """Run to the end; then each answer is the one that the request gets alone."""
        if not hasattr(self, "engine"):
            return
        steps = 0
        while self.engine.has_unfinished():
            self.settle(self.engine.step())
            steps += 1
            assert steps < 2000, "requests go round in circles"
        check_drained(self.engine)
        assert self.engine.scheduler.ranks == {}
        assert self.engine.scheduler.followers == {}
        for name, asked in self.asked.items():
            for index, whole in enumerate(alone(*asked)):
                got = tokens(self.said[name], index)
                assert got == (whole[: len(got)] if (name, index) in self.aborted else whole)


TestRuns = Runs.TestCase
TestRuns.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
