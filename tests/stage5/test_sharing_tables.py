"""Tables that share, without a scheduler or a tensor: hits, forks, copies before writes."""

from __future__ import annotations

import pytest
from provenance import check_tables, child_of, tables_of

from common.protocol import Request
from common.sampling_params import SamplingParams
from common.sequence import Sequence
from stage5_prefix_sharing.block_tables import SharingTables


def text(length: int, first: int = 7, salt: str | None = None, **params: object) -> Sequence:
    """A sequence with a prompt of so many tokens."""
    prompt = (first, *range(100, 99 + length))
    return Sequence(Request("r", prompt, SamplingParams(**params), cache_salt=salt))


def compute(tables: SharingTables, seq: Sequence, length: int | None = None) -> list[int]:
    """Look for it, begin its table, and compute it up to `length`; what was found."""
    length = length or len(seq.token_ids)
    hit = tables.match(seq)
    tables.reuse(seq, hit.copy())
    assert tables.allocate(seq, length) is not None
    advance(tables, seq, length - seq.num_computed_tokens)
    return hit


def advance(tables: SharingTables, seq: Sequence, num_new: int) -> None:
    """A forward has computed so many of its tokens."""
    seq.num_computed_tokens += num_new
    seq.counters.forwards += 1
    tables.publish([(seq, num_new)])


@pytest.mark.parametrize(
    ("length", "hit"), [(1, 0), (3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3)]
)
def test_a_hit_never_covers_the_whole_prompt(length, hit):
    """B11, B13: blocks of 4: of P tokens, those of the full blocks before the last token can be found."""
    tables = tables_of(10)
    assert compute(tables, first := text(length)) == []
    assert len(tables.pool.hash_of) == length // 4
    again = compute(tables, second := text(length))
    assert again == first.block_table[:hit]
    assert (second.counters.cached_tokens, tables.pool.counters.hits) == (4 * hit, 4 * hit)
    assert tables.pool.counters.queries == 2 * length


def test_salts_and_other_beginnings_share_nothing():
    """The same tokens under another salt, and the same second block after another first one."""
    tables = tables_of(20)
    compute(tables, text(9))
    for other in (text(9, first=8), text(9, salt="a"), text(9, salt="b")):
        assert compute(tables, other) == []
    assert len(compute(tables, text(9, salt="a"))) == 2


def test_log_probabilities_of_the_prompt_need_all_of_it():
    """B26: such a request finds nothing, and what it computed is found by others, and by itself once scored."""
    tables = tables_of(20)
    compute(tables, text(9))
    asking = text(9, prompt_logprobs=1)
    assert compute(tables, asking) == []
    asking.prompt_logprobs = [None] * 9
    assert len(tables.match(asking)) == 2
    assert len(compute(tables, text(9))) == 2


def test_switched_off_nothing_is_found_or_named():
    """Without the cache a fork still shares."""
    tables = tables_of(20, enable_prefix_caching=False)
    compute(tables, parent := text(9))
    assert tables.match(text(9)) == []
    assert (tables.pool.hash_of, parent.block_hashes) == ({}, [])
    assert child_of(tables, parent).block_table == parent.block_table


def test_a_block_is_found_only_when_it_has_been_computed():
    """B16, B17: neither allocated nor half computed; chunks of 3 in blocks of 4."""
    tables = tables_of(20)
    seq, other = text(12), text(12)
    tables.reuse(seq, [])
    found = []
    for end in (3, 6, 9, 12):
        tables.allocate(seq, end)
        found.append(len(tables.match(other)))
        advance(tables, seq, end - seq.num_computed_tokens)
        found.append(len(tables.match(other)))
    assert found == [0, 0, 0, 1, 1, 2, 2, 2]


def test_what_is_found_after_preemption_is_no_hit():
    """B25: a sequence that finds its own work again counts neither as a query nor as a hit."""
    tables = tables_of(20)
    compute(tables, seq := text(9))
    tables.free(seq)
    seq.num_computed_tokens = 0
    assert len(compute(tables, seq)) == 2
    assert seq.counters.cached_tokens == 0
    assert (tables.pool.counters.queries, tables.pool.counters.hits) == (9, 0)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_owners_of_forks(order):
    """B29: blocks of 4, P = 6: a fork and a fork of it: counts 3, 3; freed in any order, never below 0."""
    tables = tables_of(5)
    compute(tables, parent := text(6))
    full, tail = parent.block_table
    child = child_of(tables, parent)
    assert (tables.pool.ref_counts[full], tables.pool.ref_counts[tail]) == (2, 2)
    family = [parent, child, child_of(tables, child)]
    counts = []
    for i in order:
        counts.append((tables.pool.ref_counts[full], tables.pool.ref_counts[tail]))
        tables.free(family[i])
    assert counts == [(3, 3), (2, 2), (1, 1)]
    assert tables.pool.ref_counts == [0] * 5
    assert tables.pool.num_free == 5
    assert tables.holders == {}


def write_next(tables: SharingTables, seq: Sequence) -> list[int] | None:
    """A token more, and room for its K/V."""
    seq.token_ids.append(1)
    return tables.allocate(seq, len(seq.token_ids))


def test_the_last_owner_of_a_tail_needs_no_copy():
    """B28: three share a tail of 2 tokens: the first two to write get copies of it, the third keeps it."""
    tables = tables_of(5)
    compute(tables, a := text(6))
    b, c = child_of(tables, a), child_of(tables, a)
    tail = a.block_table[1]
    assert tables.pool.num_free == 3
    assert [len(write_next(tables, seq)) for seq in (a, b, c)] == [1, 1, 0]
    assert c.block_table[1] == tail
    assert tables.take_copies() == {a.block_table[1]: tail, b.block_table[1]: tail}
    assert tables.take_copies() == {}
    assert tables.pool.ref_counts[tail] == 1
    assert a.block_table[0] == b.block_table[0] == c.block_table[0]
    assert tables.pool.counters.copies == 2


def test_full_tails_need_no_copy():
    """A prompt of whole blocks: each fork opens a block of its own."""
    tables = tables_of(5)
    compute(tables, a := text(8))
    b = child_of(tables, a)
    assert [len(write_next(tables, seq)) for seq in (a, b)] == [1, 1]
    assert tables.take_copies() == {}


def test_no_room_for_a_copy_changes_nothing():
    """All or nothing, for copies as for new blocks."""
    tables = tables_of(2)
    compute(tables, a := text(6))
    b = child_of(tables, a)
    assert write_next(tables, b) is None
    assert b.block_table == a.block_table
    assert (tables.copies, tables.pool.counters.copies) == ({}, 0)


def test_a_copy_of_a_copy_reads_the_first_source():
    """All copies of a step are made at once, so a source may not be one that is itself only due."""
    tables = tables_of(6)
    compute(tables, a := text(6))
    source = a.block_table[1]
    b = child_of(tables, a)
    write_next(tables, b)
    c = child_of(tables, b)
    write_next(tables, c)
    assert tables.take_copies() == {b.block_table[1]: source, c.block_table[1]: source}


def test_a_copy_whose_owner_is_gone_is_not_made():
    """Its block may belong to somebody else by then, who writes it in the same step."""
    tables = tables_of(3)
    compute(tables, a := text(6))
    b = child_of(tables, a)
    write_next(tables, b)
    [target] = [block for block in b.block_table if block not in a.block_table]
    tables.free(b)
    c = text(3, first=9)
    tables.reuse(c, [])
    tables.allocate(c, 3)
    assert c.block_table == [target]
    assert tables.take_copies() == {}


def test_a_due_copy_outlives_one_of_two_owners():
    """The target was forked before it was filled: the fork still needs it."""
    tables = tables_of(6)
    compute(tables, a := text(6))
    b = child_of(tables, a)
    write_next(tables, b)
    c = child_of(tables, b)
    tables.free(b)
    assert tables.take_copies() == {c.block_table[1]: a.block_table[1]}


def test_a_source_may_be_handed_out_in_the_same_step():
    """Its owner is gone and its block is somebody's target or new block: it is read before anything is written."""
    tables = tables_of(4)
    compute(tables, a := text(6))
    source = a.block_table[1]
    b = child_of(tables, a)
    write_next(tables, b)
    tables.free(a)
    d = text(5, first=9)
    tables.reuse(d, [])
    tables.allocate(d, 5)
    assert source in d.block_table
    assert tables.take_copies() == {b.block_table[1]: source}


def test_usage_counts_a_shared_block_once():
    """Slots reserved and used, before and after the tails part."""
    tables = tables_of(6)
    compute(tables, a := text(6))
    b = child_of(tables, a)
    assert (tables.usage().reserved, tables.usage().used) == (8, 6)
    write_next(tables, b)
    assert (tables.usage().reserved, tables.usage().used) == (12, 8)
    check_tables(tables, [a, b])
