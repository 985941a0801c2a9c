"""What an engine holds between two steps, as plain data: who runs, who waits, and whose each block is.

All of it is read from the engine's public state, so any stage can be shown.  Paged stages have block tables;
stage 2 has one stretch of a slab for each sequence; stage 1 keeps nothing, and says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from common.protocol import Engine
from common.sequence import Sequence
from stage5_prefix_sharing.block_pool import SharingBlockPool

MAX_BLOCKS = 4096  # cells that a page can draw; blocks beyond them are counted and not shown
MAX_WAITING = 100  # of a longer queue its head is listed


def sharing_pool(engine: Engine) -> SharingBlockPool | None:
    """The pool of a stage that shares blocks; None in the others."""
    if not engine.capabilities.shares_prefixes:
        return None
    return cast(SharingBlockPool, cast(Any, engine.kv).blocks.pool)


def describe(engine: Engine) -> dict[str, Any]:
    """What stays the same as long as the engine lives.

    Returns:
        memory: "blocks", "slab" or "none".
        cell: token slots of a cell of the grid; cells: how many there are; shown: how many of them to draw.
        slots: places of a batch; continuous: whether a place is free again before its batch is over.
        shares: whether a block can have several owners.
    """
    able, config = engine.capabilities, engine.config
    memory = "blocks" if able.paged else "slab" if able.remembers_kv else "none"
    cells = -(-engine.kv.usage().capacity // config.block_size)
    return {
        "memory": memory,
        "cell": config.block_size,
        "cells": cells,
        "shown": min(cells, MAX_BLOCKS),
        "slots": config.max_num_seqs,
        "continuous": able.continuous,
        "shares": able.shares_prefixes,
    }


def snapshot(engine: Engine) -> dict[str, Any]:
    """What changes from step to step; to be called between two steps, in the engine's thread.

    Returns:
        step: forwards so far.
        running, parked, waiting: sequences in order, see `_sequence`; num_waiting: all that wait.  Parked
            are beams that keep their blocks and lack nothing, until the others of their search have caught up.
        stretches: [request, index, first slot, slots reserved, slots used] of a slab, the ended ones of a
            static batch included, as their memory is not free before the batch is over.
        cached: blocks that nobody holds and a hit would bring back.
        capacity, reserved, used: token slots.
        counts: counters that only grow.
    """
    num_new = {id(seq): count for seq, count in engine.last_batch}
    running: list[Sequence] = []
    parked: list[Sequence] = []
    waiting: list[Sequence] = []
    for seq in engine.sequences():
        has_place = bool(seq.block_table) if engine.capabilities.paged else id(seq) in num_new
        lacks = seq.num_computed_tokens < len(seq.token_ids)
        (waiting if not has_place else running if lacks else parked).append(seq)
    spans = [] if engine.capabilities.paged else engine.kv.spans()
    usage, stats, pool = engine.kv.usage(), engine.stats, sharing_pool(engine)
    return {
        "step": stats.forwards,
        "running": [_sequence(seq, num_new.get(id(seq), 0)) for seq in running],
        "parked": [_sequence(seq, num_new.get(id(seq), 0)) for seq in parked],
        "waiting": [_sequence(seq, 0) for seq in waiting[:MAX_WAITING]],
        "num_waiting": len(waiting),
        "stretches": [[s.request_id, s.index, s.start, s.reserved, s.used] for s in spans],
        "cached": [] if pool is None else _cached(pool),
        "capacity": usage.capacity,
        "reserved": usage.reserved,
        "used": usage.used,
        "counts": {
            "emitted": stats.tokens_emitted,
            "computed": stats.tokens_computed,
            "finished": stats.sequences_finished,
            "preemptions": stats.preemptions,
            "queries": stats.cache.queries,
            "hits": stats.cache.hits,
            "copies": stats.cache.copies,
            "evictions": stats.cache.evictions,
        },
    }


def _sequence(seq: Sequence, num_new: int) -> dict[str, Any]:
    """One answer: its tokens, how many of them are computed (`new` in the last forward), and its blocks."""
    return {
        "request": seq.request_id,
        "index": seq.index,
        "prompt": seq.num_prompt_tokens,
        "tokens": len(seq.token_ids),
        "computed": seq.num_computed_tokens,
        "new": num_new,
        "cached": seq.counters.cached_tokens,
        "preemptions": seq.counters.preemptions,
        "blocks": seq.block_table.copy(),
    }


def _cached(pool: SharingBlockPool) -> list[int]:
    """Those that a page can show; not a walk over all of a large pool."""
    shown: Iterable[int] = range(min(pool.num_blocks, MAX_BLOCKS))
    return [block for block in shown if block in pool.hash_of and not pool.ref_counts[block]]
