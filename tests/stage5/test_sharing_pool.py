"""The pool of stage 5 alone: owners, names, the order of handing out, and what a log of events replays to."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.invariants import chain_link, chain_root

from stage5_prefix_sharing.block_pool import CacheEvent, SharingBlockPool, block_hash, root_hash


def chain(pool: SharingBlockPool, blocks: list[int], salt: str | None = None) -> list[bytes]:
    """Publish blocks as one text, the first of them its beginning; their names."""
    parent, names = root_hash(salt), []
    for i, block in enumerate(blocks):
        names.append(block_hash(parent, [i, block]))
        pool.publish(block, names[-1], parent)
        parent = names[-1]
    return names


def replay(num_blocks: int, events: list[CacheEvent]) -> tuple[list[int], dict[int, bytes]]:
    """Reference counts and names, from nothing but the log."""
    owners, names = [0] * num_blocks, {}
    for event in events:
        match event.kind:
            case "allocate":
                assert owners[event.block] == 0
                assert event.block not in names, "handed out while it could still be found"
                owners[event.block] = 1
            case "share":
                owners[event.block] += 1
            case "release":
                owners[event.block] -= 1
            case "publish":
                assert event.hash not in names.values()
                names[event.block] = event.hash
            case "evict":
                del names[event.block]
            case "copy":
                assert owners[event.source] > 1, "nobody else would have seen the write"
        assert event.owners == owners[event.block] >= 0
    return owners, names


def test_the_log_replays_to_the_pool():
    """Every kind of event once, in the order in which it happened."""
    pool = SharingBlockPool(3)
    pool.events = []
    first, second = pool.allocate(2)
    chain(pool, [first, second])
    pool.share([first])
    pool.free([second, first])
    pool.free([first])
    third, again = pool.allocate(2)
    pool.share([again])
    [last] = pool.allocate(1)
    pool.note_copy(again, last)
    kinds = [(event.kind, event.block) for event in pool.events]
    assert kinds == [
        ("allocate", 0), ("allocate", 1), ("publish", 0), ("publish", 1), ("share", 0), ("release", 1),
        ("release", 0), ("release", 0), ("allocate", 2), ("evict", 1), ("allocate", 1), ("share", 1),
        ("evict", 0), ("allocate", 0), ("copy", 0),
    ]  # fmt: skip
    assert (third, again, last) == (2, 1, 0)
    assert pool.events[-1].source == again
    assert [(e.hash, e.parent) for e in pool.events if e.kind == "publish"][1] == (
        block_hash(block_hash(root_hash(None), [0, 0]), [1, 1]),
        block_hash(root_hash(None), [0, 0]),
    )
    assert replay(3, pool.events) == (pool.ref_counts, pool.hash_of)
    assert (pool.counters.evictions, pool.counters.copies) == (2, 1)


def test_all_or_nothing():
    """Too many asked for: None, and nothing has moved, not even a cached block."""
    pool = SharingBlockPool(3)
    blocks = pool.allocate(2)
    names = chain(pool, blocks)
    pool.free(reversed(blocks))
    before = list(pool.free_blocks)
    assert pool.allocate(4) is None
    assert list(pool.free_blocks) == before
    assert [pool.find(name) for name in names] == blocks
    assert pool.counters.evictions == 0


def test_empty_blocks_go_first_then_the_least_recently_used_deepest_first():
    """B22, B23: the order of handing out: nobody's content, then the oldest text from its end."""
    pool = SharingBlockPool(8)
    old, new, plain = pool.allocate(2), pool.allocate(3), pool.allocate(2)
    chain(pool, old), chain(pool, new)
    for table in (old, new, plain):
        pool.free(reversed(table))
    empty = [plain[0], plain[1], 7]
    assert [pool.allocate(1)[0] for _ in range(8)] == [*empty, *reversed(old), *reversed(new)]


def test_a_hit_renews_a_text():
    """B23: the older of two is used once more, so the other one goes first."""
    pool = SharingBlockPool(4)
    old, new = pool.allocate(2), pool.allocate(2)
    names = chain(pool, old) + chain(pool, new)
    pool.free(reversed(old)), pool.free(reversed(new))
    pool.share(old)
    pool.free(reversed(old))
    assert pool.allocate(2) == new[::-1]
    assert [pool.find(name) for name in names] == [*old, None, None]


def test_a_block_with_two_owners_is_free_after_the_second():
    """B29: counts go 1, 2, 1, 0 and the block is in the free list in the last case only."""
    pool = SharingBlockPool(2)
    [block] = pool.allocate(1)
    pool.share([block])
    pool.free([block])
    assert (pool.ref_counts[block], pool.num_free) == (1, 1)
    pool.free([block])
    assert (pool.ref_counts[block], pool.num_free) == (0, 2)


def test_of_two_equal_blocks_the_first_is_found():
    """The other one stays without a name, and goes back to the empty ones."""
    pool = SharingBlockPool(3)
    first, second = pool.allocate(2)
    name = block_hash(root_hash(None), [1, 2])
    pool.publish(first, name, root_hash(None))
    pool.publish(second, name, root_hash(None))
    assert pool.find(name) == first
    pool.free([first]), pool.free([second])
    assert list(pool.free_blocks) == [second, 2, first]


class TestNames:
    """What a block's name depends on: everything before it, the salt, and nothing else."""

    def test_is_a_sha256_of_parent_and_ids(self):
        """B20: 256 bits, and the same as written anew with other means; ids of any size."""
        for salt in (None, "a", "\ud800"):
            root = root_hash(salt)
            assert len(root) == 32
            assert root == chain_root(salt)
            assert block_hash(root, [0, 1, 2**40]) == chain_link(root, [0, 1, 2**40])

    def test_no_two_inputs_share_a_name(self):
        """B20: order, place of the cut, parent, salt, the carry of a base-31 polynomial, salts like other inputs."""
        root = root_hash(None)
        parent = block_hash(root, [1, 2])
        inputs = [(root, [1, 2]), (root, [2, 1]), (root, [1]), (root, [12]), (root, [258]), (root, [1, 2, 0]),
                  (root, [1 + 31, 2 - 1]), (parent, [1, 2]), (root_hash("a"), [1, 2]), (root_hash("b"), [1, 2]),
                  (root_hash("\x00"), [1, 2]), (root_hash("None"), [1, 2])]  # fmt: skip
        names = {block_hash(*each) for each in inputs}
        assert len(names) == len(inputs)
        assert {root, root_hash("a"), root_hash("b")}.isdisjoint(names)

    @pytest.mark.parametrize("pair", [("\ud83d\ude00", "\U0001f600"), ("\ud800", "\udfff"), ("é", "e\u0301")])
    def test_any_text_is_a_salt_of_its_own(self, pair):
        """Lone surrogates, which JSON can carry, name a tenant like any other text."""
        assert root_hash(pair[0]) != root_hash(pair[1])


@pytest.mark.timing
def test_a_hit_in_the_middle_takes_the_same_time_in_a_large_pool():
    """Taking cached blocks out of the middle of 1e5 free ones costs no more than of 1e3 (a list: 100 times)."""

    def seconds(num_blocks: int) -> float:
        pool = SharingBlockPool(num_blocks)
        blocks = pool.allocate(num_blocks)
        for block in blocks:
            pool.publish(block, block.to_bytes(4, "big"), b"")
        pool.free(blocks)
        middle = range(num_blocks // 2 - 100, num_blocks // 2 + 100)
        best = 1.0
        for _ in range(20):
            begin = time.perf_counter()
            pool.share(middle)
            best = min(best, time.perf_counter() - begin)
            pool.free(middle)
        return best

    assert seconds(100_000) < 10 * seconds(1_000)


class Owners(RuleBasedStateMachine):
    """Random owners of a pool's blocks, beside a model of it that is slow and plain.

    The model: who owns what (`owned`), which free block was used when (`stamp`), and which are known (`named`).
    """

    @initialize(num_blocks=st.integers(1, 9))
    def begin(self, num_blocks: int) -> None:
        """Start with all blocks empty."""
        self.pool = SharingBlockPool(num_blocks)
        self.pool.events = []
        self.owned: list[list[int]] = []
        self.named: dict[int, bytes] = {}
        self.stamp: dict[int, int] = {}
        self.clock = 0
        self.num_names = 0

    def count(self) -> Counter[int]:
        """Owners of each block."""
        return Counter(block for blocks in self.owned for block in blocks)

    def free(self) -> set[int]:
        """Blocks of no owner."""
        return set(range(self.pool.num_blocks)) - set(self.count())

    @rule(count=st.integers(0, 10))
    def allocate(self, count: int) -> None:
        """Empty ones first, then those that were used longest ago; None if there are not so many."""
        free = self.free()
        got = self.pool.allocate(count)
        if count > len(free):
            assert got is None
            return
        assert len(set(got)) == count
        assert set(got) <= free
        cached = sorted(free & self.named.keys(), key=self.stamp.__getitem__)
        empty = free - self.named.keys()
        assert set(got[: len(empty)]) <= empty
        assert got[len(empty) :] == cached[: max(0, count - len(empty))]
        for block in got:
            self.named.pop(block, None)
        self.owned.append(got)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        """A held block becomes known, by a new name or by one that is known already."""
        blocks = [block for table in self.owned for block in table if block not in self.named]
        if not blocks:
            return
        block = data.draw(st.sampled_from(blocks))
        name = data.draw(st.sampled_from([*self.named.values(), b"new"]))
        if name == b"new":
            self.num_names += 1
            name = self.named[block] = str(self.num_names).encode()
        self.pool.publish(block, name, b"parent")

    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        """Somebody finds known blocks, held or free, and is an owner more."""
        if self.named:
            blocks = data.draw(st.lists(st.sampled_from(sorted(self.named)), unique=True))
            assert [self.pool.find(self.named[block]) for block in blocks] == blocks
            self.pool.share(blocks)
            self.owned.append(blocks)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """All that one owner has, another has too."""
        table = data.draw(st.sampled_from(self.owned))
        self.pool.share(table)
        self.owned.append(table.copy())

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """An owner goes, its last block first."""
        table = self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1)))
        self.pool.free(reversed(table))
        count = self.count()
        for block in reversed(table):
            if not count[block]:
                self.clock += 1
                self.stamp[block] = self.clock

    @invariant()
    def it_is_what_the_model_says(self) -> None:
        """Free + cached + held = all; counts, names and the log agree."""
        if not hasattr(self, "pool"):
            return
        pool, count = self.pool, self.count()
        assert set(pool.free_blocks) == self.free()
        assert pool.num_free == len(self.free())
        assert pool.ref_counts == [count[block] for block in range(pool.num_blocks)]
        assert pool.hash_of == self.named
        assert pool.block_of == {name: block for block, name in self.named.items()}
        assert replay(pool.num_blocks, pool.events) == (pool.ref_counts, pool.hash_of)


TestOwners = Owners.TestCase
TestOwners.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
