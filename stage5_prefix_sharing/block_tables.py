"""Block tables that name the same blocks where their texts are the same.

    "You are a helpful assistant. | Hi!"       table [3, 7, 1]         block 3: owners 2, full, published
    "You are a helpful assistant. | Hello."    table [3, 5]            block 7: owners 1, full, published
                                                                       blocks 1, 5: one owner, being written

Two ways lead to a shared block: a new request finds it by its hash, or a sequence is forked.  A full block is
never written again, so it can be shared for good.  The last, partly filled one can be shared as well, until
one of its owners is about to write: then that owner gets a copy (copy-on-write).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from common.batch import Scheduled
from common.config import EngineConfig
from common.protocol import KVUsage, Span
from common.sequence import Sequence
from stage3_paged.block_tables import BlockTables
from stage5_prefix_sharing.block_pool import SharingBlockPool, block_hash, root_hash


class SharingTables(BlockTables):
    """Grows, shares and frees the sequences' block tables out of one pool; arguments as of `BlockTables`."""

    pool: SharingBlockPool

    def __init__(self, config: EngineConfig, bytes_per_token: int) -> None:
        super().__init__(config, bytes_per_token)
        self.pool = SharingBlockPool(self.pool.num_blocks)
        self.copies: dict[int, int] = {}  # target block -> source block, due before the next forward

    def match(self, seq: Sequence) -> list[int]:
        """The blocks, held or free, that already hold the beginning of what the sequence has to compute.

        Never all of it: the last token is always computed, since its logits are what the next one is drawn
        from.  A request that wants log probabilities of its prompt needs the logits of all its tokens.
        """
        found: list[int] = []
        for i in range(self._num_shareable(seq)):
            block = self.pool.find(self._hash(seq, i))
            if block is None:
                break
            found.append(block)
        return found

    def name_missing(self, seq: Sequence, found: Seq[int]) -> bytes | None:
        """The name of the first block that `match` looked for and did not find, if there is one."""
        return self._hash(seq, len(found)) if len(found) < self._num_shareable(seq) else None

    def names_due(self, scheduled: Scheduled) -> set[bytes]:
        """The names of the blocks that the coming forward fills."""
        if not self.config.enable_prefix_caching:
            return set()
        return {self._hash(seq, i) for seq, num_new in scheduled
                for i in self._filled(seq.num_computed_tokens, num_new)}  # fmt: skip

    def num_held(self, blocks: Seq[int]) -> int:
        """How many of these blocks somebody holds already, so that one more owner costs no memory."""
        return sum(self.pool.ref_counts[block] > 0 for block in blocks)

    def reuse(self, seq: Sequence, blocks: list[int]) -> None:
        """Begin a sequence's table with the blocks that `match` has just found for it.

        What a sequence finds again after it lost its memory is its own work, no hit of the cache.
        """
        self.pool.share(blocks)
        seq.block_table = blocks
        seq.num_computed_tokens = len(blocks) * self.block_size
        self.holders[id(seq)] = seq
        if seq.counters.forwards == 0:
            seq.counters.cached_tokens = seq.num_computed_tokens
            self.pool.counters.queries += seq.num_prompt_tokens
            self.pool.counters.hits += seq.num_computed_tokens

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Give the child all that the parent holds, for free; their first different token parts them."""
        self.pool.share(parent.block_table)
        child.block_table = parent.block_table.copy()
        child.block_hashes = parent.block_hashes.copy()
        self.holders[id(child)] = child

    def allocate(self, seq: Sequence, num_tokens: int) -> list[int] | None:
        """Make the sequence's next tokens, up to `num_tokens`, writable: the new blocks, or None and no change.

        Copy-on-write: a block that is about to be written and has other owners is replaced by a copy.
        """
        table, owners = seq.block_table, self.pool.ref_counts
        first = seq.num_computed_tokens // self.block_size
        shared = [i for i in range(first, len(table)) if owners[table[i]] > 1]
        missing = max(0, self.num_blocks(num_tokens) - len(table))
        if not shared and not missing:  # the usual decode: the last block is its own and still has room
            return []
        blocks = self.pool.allocate(len(shared) + missing)
        if blocks is None:
            return None
        for i, target in zip(shared, blocks, strict=False):
            self._copy(table[i], target)
            table[i] = target
        table += blocks[len(shared) :]
        self.holders[id(seq)] = seq
        return blocks

    def free(self, seq: Sequence) -> None:
        """Give up all blocks, tail first; those with other owners stay theirs."""
        for block in seq.block_table:
            if self.pool.ref_counts[block] == 1:
                self.copies.pop(block, None)  # nobody is left who would read the copy
        super().free(seq)

    def take_copies(self) -> dict[int, int]:
        """The block copies that are due now: target -> source."""
        due, self.copies = self.copies, {}
        return due

    def publish(self, scheduled: Scheduled) -> None:
        """After a forward: let the blocks that it filled be found."""
        if not self.config.enable_prefix_caching:
            return
        for seq, num_new in scheduled:
            for i in self._filled(seq.num_computed_tokens - num_new, num_new):
                name = self._hash(seq, i)
                self.pool.publish(seq.block_table[i], name, self._parent(seq, i))

    def usage(self) -> KVUsage:
        """Count of slots now; a block counts once, however many hold it."""
        reserved = (self.pool.num_blocks - self.pool.num_free) * self.block_size
        return KVUsage(
            capacity=self.capacity,
            reserved=reserved,
            used=reserved - sum(self._unwritten().values()),
            bytes_per_token=self.bytes_per_token,
        )

    def spans(self) -> list[Span]:
        """Each held block once, in slot order, as that of the owner who has filled least of it.

        Owners differ only while a step forks: the forked one counts the prompt that is just being computed.
        """
        owner: dict[int, Span] = {}
        for span in super().spans():
            if span.start not in owner or span.used < owner[span.start].used:
                owner[span.start] = span
        return list(owner.values())

    def _unwritten(self) -> dict[int, int]:
        """Held blocks that are not full -> their slots without a token.  Only ends of tables are looked at."""
        size = self.block_size
        empty: dict[int, int] = {}
        for seq in self.holders.values():
            for i in range(seq.num_computed_tokens // size, len(seq.block_table)):
                block, used = seq.block_table[i], max(0, seq.num_computed_tokens - i * size)
                empty[block] = max(empty.get(block, 0), size - used)
        return empty

    def _num_shareable(self, seq: Sequence) -> int:
        """How many blocks of what a sequence has to compute may be another's."""
        if not self.config.enable_prefix_caching or seq.wants_prompt_logprobs:
            return 0
        return (len(seq.token_ids) - 1) // self.block_size

    def _filled(self, num_computed: int, num_new: int) -> range:
        """The places in a table of the blocks that become full."""
        return range(num_computed // self.block_size, (num_computed + num_new) // self.block_size)

    def _copy(self, source: int, target: int) -> None:
        self.copies[target] = self.copies.get(source, source)  # of a copy still to be made: from its source
        self.pool.note_copy(source, target)
        self.pool.free([source])

    def _hash(self, seq: Sequence, i: int) -> bytes:
        """The name of the sequence's full block i.  Tokens are only ever appended, so names stay."""
        hashes, size = seq.block_hashes, self.block_size
        for j in range(len(hashes), i + 1):
            hashes.append(block_hash(self._parent(seq, j), seq.token_ids[j * size : (j + 1) * size]))
        return hashes[i]

    def _parent(self, seq: Sequence, i: int) -> bytes:
        return seq.block_hashes[i - 1] if i else root_hash(seq.request.cache_salt)
