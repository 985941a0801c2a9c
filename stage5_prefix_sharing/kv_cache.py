"""The paged cache of stage 3 over tables that share: due block copies first, then as before."""

from __future__ import annotations

import torch

from common.batch import ForwardBatch, Scheduled
from common.config import EngineConfig
from common.protocol import Model
from stage3_paged.kv_cache import PagedCache
from stage5_prefix_sharing.block_tables import SharingTables
from stage5_prefix_sharing.shared_prefix import SharedPrefix, SharingRule, attend_shared, plan_sharing


class SharingCache(PagedCache):
    """Block arrays as in stage 3; `blocks` says which blocks are whose, and which are to be copied."""

    blocks: SharingTables

    def __init__(self, model: Model, config: EngineConfig) -> None:
        super().__init__(model, config, SharingTables(config, model.config.kv_bytes_per_token(model.dtype)))
        self.sharing_rule = SharingRule.of(model, config.block_size)

    def prepare(self, batch: ForwardBatch, scheduled: Scheduled) -> None:
        """Copy what is about to be written and has other owners, lay out tables and slots, plan the reading."""
        self._copy_blocks(self.blocks.take_copies())
        super().prepare(batch, scheduled)
        batch.attention_plan = plan_sharing(batch, self.sharing_rule)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """See `KVBackend.attend`; a prefix that many decodes share is read once for all of them."""
        plan = batch.attention_plan
        if not isinstance(plan, SharedPrefix) or self.model.window(layer) is not None:
            return super().attend(layer, q, k, v, batch)
        self.kernel.store_kv(k, v, *self.layers[layer], batch.slot_mapping)
        out = attend_shared(
            self.kernel, q, self.layers[layer], plan, self.model.attention_scale
        )  # [T, Hq, D]
        return out.view(q.shape[0], -1)  # [T, Hq * D]

    def _copy_blocks(self, copies: dict[int, int]) -> None:
        """All copies at once, sources read before any target is written: a target may be another's source."""
        if not copies:
            return
        device = self.layers[0][0].device
        targets = torch.tensor(list(copies), device=device)  # [copies]
        sources = torch.tensor(list(copies.values()), device=device)  # [copies]
        for cache in (cache for layer in self.layers for cache in layer):
            cache[targets] = cache[sources]  # [copies, bs, Hkv, D]
