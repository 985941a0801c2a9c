"""Who holds which block: the bookkeeping of a paged cache, without a tensor.

A sequence's tokens are cut into blocks of `block_size`; its logical block i lies in physical block
`block_table[i]`, anywhere in the pool.  So memory is taken one block at a time, when a token needs it, and
no two sequences can be in each other's way.
"""

from __future__ import annotations

from common.config import EngineConfig
from common.errors import InvalidValue
from common.protocol import KVUsage, Request, Span
from common.sequence import Sequence
from stage3_paged.block_pool import BlockPool


class BlockTables:
    """Grows and frees the sequences' block tables out of one pool.

    Args:
        config: its `kv_bytes` and `block_size` give the number of blocks.
        bytes_per_token: K and V of one token over all layers.
    """

    def __init__(self, config: EngineConfig, bytes_per_token: int) -> None:
        self.config = config
        self.bytes_per_token = bytes_per_token
        self.block_size = config.block_size
        block_bytes = bytes_per_token * config.block_size
        if config.kv_bytes < block_bytes:
            raise InvalidValue("kv_bytes", config.kv_bytes, f"at least {block_bytes}, one block")
        self.pool = BlockPool(config.kv_bytes // block_bytes)
        self.capacity = self.pool.num_blocks * self.block_size  # token slots
        self.holders: dict[int, Sequence] = {}  # id(sequence) -> sequence

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that so many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def check_fits(self, request: Request) -> None:
        """Raise InvalidValue if even an empty pool could not take the prompt."""
        need = self.num_blocks(len(request.prompt_token_ids))
        if need > self.pool.num_blocks:
            raise InvalidValue(
                "kv_bytes",
                self.config.kv_bytes,
                f"at least {need * self.block_size * self.bytes_per_token} for this prompt: it fills {need} "
                f"blocks of {self.block_size} tokens x {self.bytes_per_token} bytes, "
                f"and {self.pool.num_blocks} blocks fit",
            )

    def can_admit(self, seq: Sequence) -> bool:
        """Whether the pool has room for what the sequence holds and one block to grow into.

        A sequence that finds nobody else there needs its own blocks only: none can take the next one away.
        """
        spare = 1 if self.holders else 0
        return self.num_blocks(len(seq.token_ids)) + spare <= self.pool.num_free

    def allocate(self, seq: Sequence, num_tokens: int) -> list[int] | None:
        """Extend the sequence's table to `num_tokens` tokens: the new blocks, or None and no change.

        The position about to be written is `num_tokens - 1`; it opens a block exactly when it is a multiple
        of the block size.
        """
        missing = -(-num_tokens // self.block_size) - len(seq.block_table)
        if missing <= 0:  # the usual decode: the last block still has room
            return []
        blocks = self.pool.allocate(missing)
        if blocks is not None:
            seq.block_table += blocks
            self.holders[id(seq)] = seq
        return blocks

    def free(self, seq: Sequence) -> None:
        """Give all blocks back, tail first; a no-op for a sequence that has none."""
        self.pool.free(reversed(seq.block_table))
        seq.block_table = []
        self.holders.pop(id(seq), None)

    def usage(self) -> KVUsage:
        """Count of slots now; a block counts whole for whoever holds it."""
        return KVUsage(
            capacity=self.capacity,
            reserved=(self.pool.num_blocks - self.pool.num_free) * self.block_size,
            used=sum(seq.num_computed_tokens for seq in self.holders.values()),
            bytes_per_token=self.bytes_per_token,
        )

    def spans(self) -> list[Span]:
        """Each held block, in slot order."""
        size = self.block_size
        spans = [
            Span(
                seq.request_id,
                seq.index,
                start=block * size,
                reserved=size,
                used=min(max(seq.num_computed_tokens - i * size, 0), size),
            )
            for seq in self.holders.values()
            for i, block in enumerate(seq.block_table)
        ]
        return sorted(spans, key=lambda span: span.start)
