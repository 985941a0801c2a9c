"""A pool whose blocks can have several owners, and can be found again by what they hold."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal

from common.protocol import CacheCounters
from stage3_paged.block_pool import BlockPool


def root_hash(salt: str | None) -> bytes:
    """Where a chain begins: requests of different salts have no hash in common, so no block either.

    The first byte keeps the three kinds of input apart: no salt, however chosen, has a block's hash.  A salt
    may be any text, even one that is no valid Unicode.
    """
    return sha256(b"\0" if salt is None else b"\1" + salt.encode(errors="surrogatepass")).digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of a full block: what it holds and, by its parent's name, all that stands before it.

    K/V of a token depends on every token before it, so equal ids alone do not make equal blocks.  With 256
    bits nobody finds two texts of one name, so a hit needs no comparison of the ids.
    """
    return sha256(b"\2" + parent + array("q", token_ids).tobytes()).digest()


@dataclass(frozen=True)
class CacheEvent:
    """One thing that happened to a block, for whoever replays them.

    `owners` is the block's reference count afterwards; `hash` and `parent` name it in a "publish" event;
    `source` is the block that a "copy" reads.
    """

    kind: Literal["allocate", "share", "release", "publish", "evict", "copy"]
    block: int
    owners: int
    hash: bytes | None = None
    parent: bytes | None = None
    source: int | None = None


class SharingBlockPool(BlockPool):
    """Each block is held by one or more tables, or free; a free one may still be cached.

        held     ref_counts > 0: somebody's table names it
        cached   nobody holds it, but its content is known by a hash: a hit brings it back
        empty    nobody holds it, and nobody could find what is in it

    `free_blocks` are the cached and the empty ones in the order of handing out: empty ones first, then the
    cached ones, the least recently used first.  A hit may leave from anywhere in that order, in O(1).
    """

    free_blocks: OrderedDict[int, None]  # type: ignore[assignment]  # a list that can be left in the middle

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free_blocks = OrderedDict.fromkeys(range(num_blocks))
        self.ref_counts = [0] * num_blocks
        self.block_of: dict[bytes, int] = {}  # these two are each other's inverse
        self.hash_of: dict[int, bytes] = {}
        self.counters = CacheCounters()
        self.events: list[CacheEvent] | None = None  # a list, if somebody wants to know

    def allocate(self, count: int) -> list[int] | None:
        """Hand out `count` blocks with one owner each, or None (and nothing at all) if there are not so many.

        What a cached block held is lost now, and not before.
        """
        if count > self.num_free:
            return None
        blocks = [self.free_blocks.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            if block in self.hash_of:
                del self.block_of[self.hash_of.pop(block)]
                self.counters.evictions += 1
                self._log("evict", block)
            self.ref_counts[block] = 1
            self._log("allocate", block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Give each block one more owner; one that lay free is free no more."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self.free_blocks[block]
            self.ref_counts[block] += 1
            self._log("share", block)

    def free(self, blocks: Iterable[int]) -> None:
        """Take one owner from each block; one without any is free, and keeps its content until handed out.

        Of blocks freed together the first is handed out first.  So a table is given tail first: the
        beginning of a text is of use without its end, the end is not without the beginning.
        """
        for block in blocks:
            self.ref_counts[block] -= 1
            self._log("release", block)
            if self.ref_counts[block] == 0:
                self.free_blocks[block] = None
                if block not in self.hash_of:
                    self.free_blocks.move_to_end(block, last=False)

    def publish(self, block: int, name: bytes, parent: bytes) -> None:
        """Let a full, computed block be found; where another block has the same content, that one stays."""
        if name not in self.block_of:
            self.block_of[name] = block
            self.hash_of[block] = name
            self._log("publish", block, hash=name, parent=parent)

    def find(self, name: bytes) -> int | None:
        """The block that holds this content, held or free."""
        return self.block_of.get(name)

    def note_copy(self, source: int, block: int) -> None:
        """Count that `block` is to become a copy of `source`."""
        self.counters.copies += 1
        self._log("copy", block, source=source)

    def _log(self, kind: Literal["allocate", "share", "release", "publish", "evict", "copy"], block: int,
             hash: bytes | None = None, parent: bytes | None = None, source: int | None = None) -> None:  # fmt: skip
        if self.events is not None:
            self.events.append(CacheEvent(kind, block, self.ref_counts[block], hash, parent, source))
