"""What must hold after every operation on an engine's memory (DESIGN.md 5), and poison for what nobody owns."""

from __future__ import annotations

import math

from common.protocol import Engine


def check_memory(engine: Engine) -> None:
    """Spans are disjoint, inside the cache, and add up to what `usage` says."""
    usage, spans = engine.kv.usage(), engine.kv.spans()
    end = 0
    for span in spans:
        assert span.start >= end, "two sequences share slots"
        assert 0 <= span.used <= span.reserved
        end = span.start + span.reserved
    assert end <= usage.capacity or not spans
    assert usage.reserved == sum(span.reserved for span in spans)
    assert usage.used == sum(span.used for span in spans)
    assert usage.used <= usage.reserved
    live = {(seq.request_id, seq.index) for seq in engine.sequences()}
    if engine.capabilities.paged:
        assert {(span.request_id, span.index) for span in spans} <= live, "memory held by the dead"
        check_blocks(engine)


def check_blocks(engine: Engine) -> None:
    """All blocks are free or held, each in exactly one place; tables have just the blocks they need."""
    kv = engine.kv
    held = [block for seq in engine.sequences() for block in seq.block_table]
    assert sorted(held + kv.blocks.pool.free_blocks) == list(range(kv.blocks.pool.num_blocks))
    for seq in engine.sequences():
        written = kv.blocks.num_blocks(seq.num_computed_tokens)
        assert written <= len(seq.block_table) <= kv.blocks.num_blocks(len(seq.token_ids))


def check_drained(engine: Engine) -> None:
    """After the last request: nothing reserved, nothing remembered."""
    assert not engine.has_unfinished()
    assert engine.live == {}
    assert engine.kv.usage().reserved == 0
    assert engine.kv.spans() == []
    if engine.capabilities.paged:
        assert sorted(engine.kv.blocks.pool.free_blocks) == list(range(engine.kv.blocks.pool.num_blocks))


def poison_free_memory(engine: Engine) -> None:
    """Fill every slot that no token's K/V lies in with NaN, so that a stale read shows at once."""
    kv = engine.kv
    if not engine.capabilities.remembers_kv:
        return
    keep = {span.start + i for span in kv.spans() for i in range(span.used)}
    dead = [slot for slot in range(kv.usage().capacity) if slot not in keep]
    if engine.capabilities.paged:
        for cache in (cache for layer in kv.layers for cache in layer):
            cache.view(-1, *cache.shape[2:])[dead] = math.nan  # [N * bs, Hkv, D]
    else:
        kv.k[:, dead] = math.nan
        kv.v[:, dead] = math.nan
