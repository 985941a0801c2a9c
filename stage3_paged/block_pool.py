"""The free list of KV blocks: all of one size, so any free block serves any sequence."""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """`num_blocks` blocks, each either free or held.

    A stack: the block given back last is handed out first, while its memory is still in the processor's
    caches.  Which block a sequence gets does not matter, since its table says where everything is.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free_blocks = list(range(num_blocks))[::-1]  # block 0 on top

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self.free_blocks)

    def allocate(self, count: int) -> list[int] | None:
        """Hand out `count` blocks, or None (and nothing at all) if there are not so many."""
        if count > self.num_free:
            return None
        return [self.free_blocks.pop() for _ in range(count)]

    def free(self, blocks: Iterable[int]) -> None:
        """Take blocks back; the last of them will be handed out first."""
        self.free_blocks.extend(blocks)
