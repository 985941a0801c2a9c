"""The paged KV cache: block arrays for every layer, slots for every write, attention through block tables."""

from __future__ import annotations

import numpy as np
import torch

from common.batch import ForwardBatch, Scheduled
from common.config import EngineConfig
from common.protocol import KVUsage, Model, Request, Span
from stage3_paged.block_tables import BlockTables
from stage3_paged.kernels import load_kernel


class PagedCache:
    """One K and one V array of blocks per layer; `blocks` says which block is whose."""

    def __init__(self, model: Model, config: EngineConfig, blocks: BlockTables | None = None) -> None:
        self.model = model.config
        self.blocks = blocks or BlockTables(config, model.config.kv_bytes_per_token(model.dtype))
        # The last token of an answer is never computed, so it needs no slot.
        self.max_len = self.blocks.capacity + 1
        self.kernel = load_kernel(config.kernel, model.device)
        shape = (self.blocks.pool.num_blocks, config.block_size, self.model.num_kv_heads, self.model.head_dim)
        self.layers = [
            self.kernel.make_cache(*shape, model.dtype, model.device) for _ in range(self.model.num_layers)
        ]

    def prepare(self, batch: ForwardBatch, scheduled: Scheduled) -> None:
        """Lay out the block tables and the slot of each new token, once for all layers."""
        widest = max(len(seq.block_table) for seq, _ in scheduled)
        tables = np.zeros((len(scheduled), widest), dtype=np.int32)  # [B, max blocks]
        for row, (seq, _) in zip(tables, scheduled, strict=True):
            row[: len(seq.block_table)] = seq.block_table
        size = self.blocks.block_size
        owner = np.repeat(np.arange(len(scheduled)), batch.query_lens)  # [T]
        position = batch.positions.numpy()  # [T]
        block = tables[owner, position // size].astype(np.int64)  # [T]
        batch.block_tables = torch.from_numpy(tables)
        batch.slot_mapping = torch.from_numpy(block * size + position % size)  # [T]

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """See `KVBackend.attend`; the kernel stores by slot and reads through the block table."""
        k_cache, v_cache = self.layers[layer]
        self.kernel.store_kv(k, v, k_cache, v_cache, batch.slot_mapping)
        out = self.kernel.paged_attention(
            q,
            k_cache,
            v_cache,
            batch.block_tables,
            batch.query_start,
            batch.seq_lens,
            self.model.attention_scale,
            window=self.model.window(layer),
            query_lens=batch.query_lens,
            context_lens=batch.context_lens,
        )  # [T, Hq, D]
        return out.view(q.shape[0], -1)  # [T, Hq * D]

    def check_fits(self, request: Request) -> None:
        """Raise InvalidValue if even an empty pool could not take the prompt."""
        self.blocks.check_fits(request)

    def usage(self) -> KVUsage:
        """Count of slots now."""
        return self.blocks.usage()

    def spans(self) -> list[Span]:
        """Each held block, in slot order."""
        return self.blocks.spans()
