"""Random steps of the tables, beyond what one scheduler would do, over a memory that knows whose K/V is where."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from provenance import Memory, check_tables, child_of, findable, tables_of

from common.protocol import Request
from common.sampling_params import SamplingParams
from common.sequence import Sequence


class Steps(RuleBasedStateMachine):
    """Steps of any scheduler: admissions, chunks, decodes, forks and losses in any order, then a forward.

    Every slot knows what was written to it; free blocks that nobody can find are poisoned after each forward.
    """

    @initialize(num_blocks=st.integers(3, 10), block_size=st.sampled_from([1, 2, 4]), caching=st.booleans())
    def begin(self, num_blocks: int, block_size: int, caching: bool) -> None:
        """An empty cache."""
        self.tables = tables_of(num_blocks, block_size, enable_prefix_caching=caching)
        self.memory = Memory(self.tables)
        self.live: list[Sequence] = []
        self.lost: list[Sequence] = []  # preempted
        self.step: dict[Sequence, int] = {}  # what the next forward computes
        self.born: dict[Sequence, Sequence] = {}  # forked in this step from one whose prompt it completes

    def admit(self, seq: Sequence, chunk: int) -> bool:
        """As a scheduler does it: count a free hit as taken, then begin with the hit."""
        tables = self.tables
        hit = tables.match(seq)
        assert hit == (findable(tables, seq) if tables.config.enable_prefix_caching else [])
        assert len(hit) * tables.block_size < len(seq.token_ids)
        if tables.num_blocks(len(seq.token_ids)) - tables.num_held(hit) > tables.pool.num_free:
            return False
        tables.reuse(seq, hit)
        self.memory.read(seq, seq.num_computed_tokens)
        num_new = min(chunk, len(seq.token_ids) - seq.num_computed_tokens)
        assert tables.allocate(seq, seq.num_computed_tokens + num_new) is not None
        self.live.append(seq)
        self.step[seq] = num_new
        return True

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12), salt=st.sampled_from([None, "a"]),
          chunk=st.integers(1, 12))  # fmt: skip
    def enter(self, prompt: list[int], salt: str | None, chunk: int) -> None:
        """A new request; few tokens, so that beginnings are often alike."""
        self.admit(Sequence(Request("r", tuple(prompt), SamplingParams(), cache_salt=salt)), chunk)

    @precondition(lambda self: self.lost)
    @rule(chunk=st.integers(1, 12))
    def resume(self, chunk: int) -> None:
        """One that lost its memory comes back."""
        if self.admit(self.lost[-1], chunk):
            self.lost.pop()

    @rule(data=st.data(), chunk=st.integers(1, 12), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, chunk: int, token: int) -> None:
        """A chunk of what is lacking; or, where nothing is, a token more."""
        idle = [seq for seq in self.live if seq not in self.step]
        if not idle:
            return
        seq = data.draw(st.sampled_from(idle))
        if seq.num_computed_tokens == len(seq.token_ids):
            seq.token_ids.append(token)
        num_new = min(chunk, len(seq.token_ids) - seq.num_computed_tokens)
        before = (seq.block_table.copy(), list(self.tables.pool.free_blocks), self.tables.copies.copy())
        if self.tables.allocate(seq, seq.num_computed_tokens + num_new) is None:
            assert before == (seq.block_table, list(self.tables.pool.free_blocks), self.tables.copies)
        else:
            self.step[seq] = num_new

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """From one that is computed, or is about to be."""
        ready = [s for s in self.live if s.num_computed_tokens + self.step.get(s, 0) == len(s.token_ids)]
        if not ready or len(self.live) > 12:
            return
        parent = data.draw(st.sampled_from(ready))
        child = child_of(self.tables, parent)
        child.num_computed_tokens = len(parent.token_ids)
        if parent in self.step:
            self.step[child] = 0
            self.born[child] = self.born.get(parent, parent)
        self.live.append(child)

    @rule(data=st.data(), forever=st.booleans())
    def lose(self, data: st.DataObject, forever: bool) -> None:
        """Preempted or taken back; not one that computes what others were just forked for."""
        candidates = [seq for seq in self.live if seq not in self.born.values()]
        if not candidates:
            return
        seq = data.draw(st.sampled_from(candidates))
        self.live.remove(seq)
        self.step.pop(seq, None)
        self.born.pop(seq, None)
        self.tables.free(seq)
        seq.num_computed_tokens = 0
        seq.counters.forwards = 1
        if not forever:
            self.lost.append(seq)

    @precondition(lambda self: self.step)
    @rule()
    def forward(self) -> None:
        """Copies, writes, reads; then what was filled can be found."""
        self.memory.copy(self.tables.take_copies())
        for seq, num_new in self.step.items():
            forked = [child for child, parent in self.born.items() if parent is seq]
            self.memory.write(seq, num_new, forked)
        for seq, num_new in self.step.items():
            self.memory.read(seq, seq.num_computed_tokens + num_new)
            seq.num_computed_tokens += num_new
        self.tables.publish(list(self.step.items()))
        self.step, self.born = {}, {}
        self.memory.poison_free_blocks()

    @invariant()
    def tables_are_sound(self) -> None:
        """After every operation."""
        if hasattr(self, "tables"):
            check_tables(self.tables, self.live)

    def teardown(self) -> None:
        """When all are gone, everything is free."""
        if hasattr(self, "tables"):
            for seq in self.live:
                self.tables.free(seq)
            check_tables(self.tables, [])
            assert self.tables.copies == {}
            assert self.tables.holders == {}


TestSteps = Steps.TestCase
TestSteps.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
