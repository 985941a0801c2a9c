"""A cache without numbers: each slot remembers whose K/V lies in it, so that a wrong read or write shows at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from support.invariants import chain_link, chain_root

from common.config import EngineConfig
from common.sequence import Sequence
from stage5_prefix_sharing.block_tables import SharingTables

Tag = tuple[str | None, tuple[int, ...]]
"""What a token's K/V depends on: the tokens up to itself.  The salt says in whose name it was computed."""


def tag(seq: Sequence, position: int) -> Tag:
    """What must lie in the slot of this position."""
    return seq.request.cache_salt, tuple(seq.token_ids[: position + 1])


class Memory:
    """What the block arrays of `tables` hold, by slot; a slot that is not there is poison."""

    def __init__(self, tables: SharingTables) -> None:
        self.tables = tables
        self.slots: dict[int, Tag] = {}

    def slot(self, seq: Sequence, position: int) -> int:
        """Where the sequence's table says that this position lies."""
        size = self.tables.block_size
        return seq.block_table[position // size] * size + position % size

    def copy(self, copies: dict[int, int]) -> None:
        """Whole blocks, target <- source, all sources read before anything is written."""
        size, before = self.tables.block_size, self.slots.copy()
        for target, source in copies.items():
            for offset in range(size):
                self.slots.pop(target * size + offset, None)
                if source * size + offset in before:
                    self.slots[target * size + offset] = before[source * size + offset]

    def write(self, seq: Sequence, num_new: int, forked: Iterable[Sequence]) -> None:
        """Store the next tokens' K/V.  Whoever else owns the block was forked in this step, with the same text."""
        computed, size = seq.num_computed_tokens, self.tables.block_size
        for position in range(computed, computed + num_new):
            block = seq.block_table[position // size]
            same = [other for other in forked if block in other.block_table]
            assert self.tables.pool.ref_counts[block] == 1 + len(same), "a block with two owners is written"
            assert all(tag(other, position) == tag(seq, position) for other in same)
            assert block not in self.tables.pool.hash_of, "a full block is written"
            self.slots[self.slot(seq, position)] = tag(seq, position)

    def read(self, seq: Sequence, length: int) -> None:
        """All that a forward reads of the sequence is its own."""
        for position in range(length):
            assert self.slots.get(self.slot(seq, position)) == tag(seq, position)

    def poison_free_blocks(self) -> None:
        """Forget what lies in blocks that nobody has and nobody can find."""
        pool, size = self.tables.pool, self.tables.block_size
        for block in pool.free_blocks:
            if block not in pool.hash_of:
                for offset in range(size):
                    self.slots.pop(block * size + offset, None)


def check_tables(tables: SharingTables, live: list[Sequence]) -> None:
    """All blocks free or held, counts = tables that name them, names and blocks agree both ways, spans add up."""
    pool = tables.pool
    held = Counter(block for seq in live for block in seq.block_table)
    assert pool.ref_counts == [held[block] for block in range(pool.num_blocks)]
    assert sorted([*held, *pool.free_blocks]) == list(range(pool.num_blocks))
    assert {block: name for name, block in pool.block_of.items()} == pool.hash_of
    assert len(pool.block_of) == len(pool.hash_of)
    assert set(tables.copies) <= held.keys(), "a copy for nobody"
    usage, spans = tables.usage(), tables.spans()
    assert usage.reserved == sum(span.reserved for span in spans) == len(held) * tables.block_size
    assert usage.used == sum(span.used for span in spans)
    assert [span.start // tables.block_size for span in spans] == sorted(held)


def findable(tables: SharingTables, seq: Sequence) -> list[int]:
    """The blocks that a right `match` finds: the longest known beginning, at least one token short of all."""
    size, parent, found = tables.block_size, chain_root(seq.request.cache_salt), []
    for i in range((len(seq.token_ids) - 1) // size):
        parent = chain_link(parent, seq.token_ids[i * size : (i + 1) * size])
        if parent not in tables.pool.block_of:
            break
        found.append(tables.pool.block_of[parent])
    return found


def tables_of(num_blocks: int, block_size: int = 4, **options: object) -> SharingTables:
    """Tables over so many blocks, at a byte per token."""
    config = EngineConfig(
        kv_bytes=num_blocks * block_size, max_model_len=512, block_size=block_size, **options
    )
    return SharingTables(config, bytes_per_token=1)


def child_of(tables: SharingTables, parent: Sequence) -> Sequence:
    """A fork, with the same tokens computed."""
    child = Sequence(parent.request, parent.index + 1)
    child.token_ids = parent.token_ids.copy()
    child.num_computed_tokens = parent.num_computed_tokens
    tables.fork(parent, child)
    return child
