"""A snapshot says what the engine holds, on random runs of every stage."""

from __future__ import annotations

import json
import random
from collections import Counter

from support.engines import ask, build
from support.scripted import ScriptedModel

from common.beam_params import BeamSearchParams
from common.protocol import Request
from stage6_api.live_snapshot import describe, snapshot

PROMPTS = [tuple(range(10, 10 + length)) for length in (3, 9, 14, 22)]


def test_agrees_with_the_engine(stage):
    """After every operation of a random run: owners, free and cached blocks, token counts, everybody once."""
    draw = random.Random(stage)
    engine = build(stage, ScriptedModel({}), kv_tokens=112, max_num_seqs=4, max_model_len=64)
    most = Counter()
    for number in range(160):
        act(engine, draw, number)
        seen = json.loads(json.dumps(snapshot(engine)))
        check_sequences(engine, seen)
        check_memory(engine, seen)
        most |= Counter({name: len(value) for name, value in seen.items() if isinstance(value, list)})
        most |= Counter({**seen["counts"], "shared": shared(seen)})
    able = engine.capabilities
    assert most["waiting"] > 0
    assert (most["parked"] > 0) == able.beam_search
    assert (most["running"] > 1) == able.batches
    assert (most["preemptions"] > 0) == able.preempts
    assert bool(most["copies"] and most["shared"]) == able.shares_prefixes
    assert (most["cached"] > 0) == (able.shares_prefixes and engine.config.enable_prefix_caching)
    assert (most["stretches"] > 0) == (describe(engine)["memory"] == "slab")


def act(engine, draw, number):
    """A step mostly; else a request comes, or one is taken back."""
    kind = draw.random()
    if kind < 0.2:
        prompt = draw.choice(PROMPTS)
        beam = BeamSearchParams(3, max_tokens=6) if engine.capabilities.beam_search and kind < 0.04 else None
        if beam is not None:
            engine.add_request(Request(f"r{number}", prompt, beam.sampling_params(), beam=beam))
        else:
            length = draw.randint(5, 40)
            engine.add_request(ask(f"r{number}", prompt, n=draw.choice((1, 1, 2)), temperature=1.0,
                                   max_tokens=length, ignore_eos=True))  # fmt: skip
    elif kind < 0.23 and engine.live:
        engine.abort(draw.choice(sorted(engine.live)))
    else:
        engine.step()


def check_sequences(engine, seen):
    """Everybody who is unfinished is there once, with its numbers, in the engine's order."""
    told = everybody(seen)
    assert len(seen["waiting"]) == seen["num_waiting"]
    live = {(seq.request_id, seq.index): seq for seq in engine.sequences()}
    assert sorted(live) == sorted((one["request"], one["index"]) for one in told)
    for one in told:
        seq = live[one["request"], one["index"]]
        assert (one["tokens"], one["computed"]) == (len(seq.token_ids), seq.num_computed_tokens)
        assert one["prompt"] == len(seq.request.prompt_token_ids)
    assert len(seen["running"]) <= engine.config.max_num_seqs


def check_memory(engine, seen):
    """What can be read off the snapshot is what the pool, or the slab, has in its books."""
    usage = engine.kv.usage()
    assert (seen["capacity"], seen["reserved"], seen["used"]) == (usage.capacity, usage.reserved, usage.used)
    if not engine.capabilities.paged:
        assert sum(size for _, _, _, size, _ in seen["stretches"]) == usage.reserved
        assert sum(used for _, _, _, _, used in seen["stretches"]) == usage.used
        return
    pool = engine.kv.blocks.pool
    owners = owned(seen)
    assert owners.keys().isdisjoint(pool.free_blocks)
    assert len(owners) + len(pool.free_blocks) == pool.num_blocks == describe(engine)["cells"]
    if engine.capabilities.shares_prefixes:
        assert owners == {block: count for block, count in enumerate(pool.ref_counts) if count}
        assert seen["cached"] == sorted(set(pool.hash_of) - owners.keys())


def everybody(seen):
    """All sequences of a snapshot."""
    return [*seen["running"], *seen["parked"], *seen["waiting"]]


def owned(seen):
    """Block -> how many of the shown tables name it."""
    return Counter(block for one in everybody(seen) for block in one["blocks"])


def shared(seen):
    """Blocks with several owners."""
    return sum(count > 1 for count in owned(seen).values())


def test_long_queues_and_large_pools_are_cut():
    """The head of the queue, with the number of all; no more blocks than a page draws."""
    engine = build("5", ScriptedModel({}), kv_tokens=40_000, max_num_seqs=1)
    for number in range(150):
        engine.add_request(ask(f"r{number}", PROMPTS[number % 4]))
    seen = snapshot(engine)
    assert (len(seen["waiting"]), seen["num_waiting"]) == (100, 150)
    assert seen["waiting"][0]["request"] == "r0"
    about = describe(engine)
    assert (about["cells"], about["shown"]) == (10_000, 4096)
