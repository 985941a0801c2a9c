"""The pool and the tables alone: random runs against a model of plain sets, and the growth rule by hand."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.config import EngineConfig
from common.protocol import Request
from common.sampling_params import SamplingParams
from common.sequence import Sequence
from stage3_paged.block_pool import BlockPool
from stage3_paged.block_tables import BlockTables

BYTES_PER_TOKEN = 10


def tables(num_blocks: int, block_size: int = 4) -> BlockTables:
    """Block tables over `num_blocks` blocks (and a few bytes that make no whole block)."""
    kv_bytes = num_blocks * block_size * BYTES_PER_TOKEN + BYTES_PER_TOKEN // 2
    config = EngineConfig(kv_bytes=kv_bytes, max_model_len=1000, block_size=block_size)
    return BlockTables(config, BYTES_PER_TOKEN)


def sequence(prompt_tokens: int, name: str = "a") -> Sequence:
    """A sequence with a prompt of so many tokens."""
    return Sequence(Request(name, (1,) * prompt_tokens, SamplingParams()))


@pytest.mark.parametrize("prompt_tokens", [1, 3, 4, 5, 8])
def test_a_block_is_added_exactly_at_a_multiple_of_the_block_size(prompt_tokens):
    """B02: with 4 tokens in blocks of 4 the first decode opens block 2, with 3 or 5 it does not."""
    blocks = tables(8)
    seq = sequence(prompt_tokens)
    blocks.allocate(seq, prompt_tokens)
    assert len(seq.block_table) == (prompt_tokens + 3) // 4
    for position in range(prompt_tokens, 20):  # the position that the next decode writes
        before = list(seq.block_table)
        new = blocks.allocate(seq, position + 1)
        assert len(new) == (1 if position % 4 == 0 else 0)
        assert seq.block_table == before + new, "a table only ever grows at its end"


def test_allocation_is_all_or_nothing():
    """None leaves the pool and the table as they were."""
    blocks = tables(3)
    one, two = sequence(8, "one"), sequence(8, "two")
    assert blocks.allocate(one, 8) is not None
    assert blocks.allocate(two, 8) is None
    assert (two.block_table, blocks.pool.num_free) == ([], 1)
    assert blocks.allocate(two, 4) is not None
    blocks.free(one)
    blocks.free(one)  # B08: a second time is a no-op
    assert blocks.pool.num_free == 2


def test_pool_hands_out_the_block_given_back_last():
    """Its memory is the likeliest to be in the processor's caches still."""
    pool = BlockPool(4)
    a, b = pool.allocate(2), pool.allocate(2)
    assert sorted(a + b) == [0, 1, 2, 3]
    pool.free(b)
    pool.free(a)
    assert pool.allocate(1) == [a[-1]]


def test_a_table_is_given_back_tail_first():
    """So its first block is the next to be handed out: the beginnings of texts are what later stages share."""
    blocks = tables(6)
    one, two = sequence(12, "one"), sequence(12, "two")
    blocks.allocate(one, 12)
    held = list(one.block_table)
    blocks.free(one)
    assert blocks.allocate(two, 12) == held


def test_admission_leaves_a_block_to_grow_into_unless_nobody_else_is_there():
    """A prompt that fills the pool must still be served when it is alone (B04, B46)."""
    blocks = tables(4)
    whole, half = sequence(16, "whole"), sequence(8, "half")
    assert blocks.can_admit(whole)
    blocks.allocate(half, 8)
    assert not blocks.can_admit(whole)
    assert blocks.can_admit(sequence(4, "small"))
    assert not blocks.can_admit(sequence(8, "other"))


class Tables(RuleBasedStateMachine):
    """Grow, free and refuse in any order; a dict of sets says what must be."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = tables(7, block_size=4)
        self.seqs = [sequence(1, str(i)) for i in range(4)]
        self.tokens = [0] * 4

    @rule(who=st.integers(0, 3), more=st.integers(0, 9))
    def grow(self, who: int, more: int) -> None:
        """Either the table covers the tokens afterwards, or there were not enough free blocks."""
        seq, want = self.seqs[who], self.tokens[who] + more
        missing = max(0, (want + 3) // 4 - len(seq.block_table))
        free = self.blocks.pool.num_free
        got = self.blocks.allocate(seq, want)
        if missing > free:
            assert got is None
            return
        assert len(got) == missing
        self.tokens[who] = seq.num_computed_tokens = want

    @precondition(lambda self: any(seq.block_table for seq in self.seqs))
    @rule(who=st.integers(0, 3))
    def free(self, who: int) -> None:
        """The end, or a preemption."""
        self.blocks.free(self.seqs[who])
        self.tokens[who] = self.seqs[who].num_computed_tokens = 0

    @invariant()
    def every_block_is_in_exactly_one_place(self) -> None:
        """Sorted, free + held = all, none twice."""
        held = [block for seq in self.seqs for block in seq.block_table]
        assert sorted(held + self.blocks.pool.free_blocks) == list(range(7))

    @invariant()
    def usage_and_spans_agree(self) -> None:
        """Only the last block of a sequence may have a tail."""
        usage, spans = self.blocks.usage(), self.blocks.spans()
        assert usage.used == sum(self.tokens) == sum(span.used for span in spans)
        assert usage.reserved == 4 * sum((tokens + 3) // 4 for tokens in self.tokens)
        assert usage.reserved - usage.used <= 3 * len([t for t in self.tokens if t])
        assert [span.start for span in spans] == sorted({span.start for span in spans})


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
