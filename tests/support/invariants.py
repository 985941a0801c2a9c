"""What must hold after every operation on an engine's memory (DESIGN.md 5), and poison for what nobody owns."""

from __future__ import annotations

import math
import struct
from collections import Counter
from hashlib import sha256

import torch

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
    kv, pool = engine.kv, engine.kv.blocks.pool
    held = Counter(block for seq in engine.sequences() for block in seq.block_table)
    assert sorted([*held, *pool.free_blocks]) == list(range(pool.num_blocks))
    if engine.capabilities.shares_prefixes:
        assert held == {block: owners for block, owners in enumerate(pool.ref_counts) if owners}
        assert {block: name for name, block in pool.block_of.items()} == pool.hash_of
        assert kv.blocks.copies == {}, "copies were promised and not made"
        check_contents(engine)
    else:
        assert max(held.values(), default=1) == 1, "two owners where nothing is shared"
    for seq in engine.sequences():
        written = kv.blocks.num_blocks(seq.num_computed_tokens)
        assert written <= len(seq.block_table) <= kv.blocks.num_blocks(len(seq.token_ids))


def check_contents(engine: Engine) -> None:
    """A held block that can be found holds just the tokens that its name stands for."""
    for seq in engine.sequences():
        size, parent = engine.config.block_size, chain_root(seq.request.cache_salt)
        for i, block in enumerate(seq.block_table[: seq.num_computed_tokens // size]):
            parent = chain_link(parent, seq.token_ids[i * size : (i + 1) * size])
            assert engine.kv.blocks.pool.hash_of.get(block, parent) == parent


def chain_root(salt: str | None) -> bytes:
    """The name of nothing, written anew: see `root_hash`."""
    return sha256(b"\x00" if salt is None else b"\x01" + salt.encode(errors="surrogatepass")).digest()


def chain_link(parent: bytes, token_ids: list[int]) -> bytes:
    """The name of a block after another, written anew: see `block_hash`."""
    return sha256(b"\x02" + parent + struct.pack(f"={len(token_ids)}q", *token_ids)).digest()


def check_drained(engine: Engine) -> None:
    """After the last request: nothing reserved, nothing remembered."""
    assert not engine.has_unfinished()
    assert engine.live == {}
    assert engine.kv.usage().reserved == 0
    assert engine.kv.spans() == []
    if engine.capabilities.paged:
        assert engine.kv.blocks.holders == {}
        assert sorted(engine.kv.blocks.pool.free_blocks) == list(range(engine.kv.blocks.pool.num_blocks))


def poison_free_memory(engine: Engine) -> None:
    """Fill every slot that no token's K/V lies in with NaN, so that a stale read shows at once."""
    kv = engine.kv
    if not engine.capabilities.remembers_kv:
        return
    keep = {span.start + i for span in kv.spans() for i in range(span.used)}
    if engine.capabilities.shares_prefixes:  # cached blocks belong to nobody, and are read again
        size = engine.config.block_size
        keep |= {block * size + i for block in kv.blocks.pool.hash_of for i in range(size)}
    dead = [slot for slot in range(kv.usage().capacity) if slot not in keep]
    if engine.capabilities.paged:
        for cache in (cache for layer in kv.layers for cache in layer):
            size, slots = cache.shape[1], torch.tensor(dead, dtype=torch.int64)
            cache[slots // size, slots % size] = (
                math.nan
            )  # [dead, Hkv, D]; kernels lay blocks out in their own ways
    else:
        kv.k[:, dead] = math.nan
        kv.v[:, dead] = math.nan
