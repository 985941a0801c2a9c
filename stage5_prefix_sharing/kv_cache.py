"""The paged cache of stage 3 over tables that share: due block copies first, then as before."""

from __future__ import annotations

import torch

from common.batch import ForwardBatch, Scheduled
from common.config import EngineConfig
from common.protocol import Model
from stage3_paged.kv_cache import PagedCache
from stage5_prefix_sharing.block_tables import SharingTables


class SharingCache(PagedCache):
    """Block arrays as in stage 3; `blocks` says which blocks are whose, and which are to be copied."""

    blocks: SharingTables

    def __init__(self, model: Model, config: EngineConfig) -> None:
        super().__init__(model, config, SharingTables(config, model.config.kv_bytes_per_token(model.dtype)))

    def prepare(self, batch: ForwardBatch, scheduled: Scheduled) -> None:
        """Copy what is about to be written and has other owners, then lay out tables and slots."""
        self._copy_blocks(self.blocks.take_copies())
        super().prepare(batch, scheduled)

    def _copy_blocks(self, copies: dict[int, int]) -> None:
        """All copies at once, sources read before any target is written: a target may be another's source."""
        if not copies:
            return
        device = self.layers[0][0].device
        targets = torch.tensor(list(copies), device=device)  # [copies]
        sources = torch.tensor(list(copies.values()), device=device)  # [copies]
        for cache in (cache for layer in self.layers for cache in layer):
            cache[targets] = cache[sources]  # [copies, bs, Hkv, D]
