"""Prefixes read once for all who share them, in the engine: the same tokens, and what decides about it."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.engines import ask, build, run, tokens
from support.invariants import check_drained, poison_free_memory

from common.batch import ForwardBatch, Scheduled
from common.model.decoder import Decoder
from common.model.zoo import tiny_decoder
from common.protocol import Engine, Request
from stage5_prefix_sharing.shared_prefix import SharedPrefix, SharingRule

FAMILIES = {
    "llama": {},
    "qwen2": {
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
    },  # both kinds of layers
    "qwen3": {"num_key_value_heads": 1},
}
ON, OFF = 1, math.inf


def decoder(family: str, dtype: torch.dtype = torch.float64) -> Decoder:
    """A tiny model."""
    return tiny_decoder(family, dtype, **FAMILIES[family])


def engine_with(least: float, model: Decoder, tile: int = 3, **options: object) -> Engine:
    """Stage 5, told when to share."""
    engine = build("stage5_prefix_sharing", model, max_num_batched_tokens=24, max_num_seqs=8, **options)
    engine.kv.sharing_rule = replace(engine.kv.sharing_rule, least_saved=least, tile=tile)
    return engine


def agents() -> list[Request]:
    """Users of two agents with long prompts, some with several answers, and two who share nothing."""
    rng = random.Random(3)

    def text(length: int) -> list[int]:
        return [rng.randrange(3, 300) for _ in range(length)]

    system, other = text(21), text(16)
    prompts = [system + text(n) for n in (5, 1, 9)] + [other + text(n) for n in (2, 7)] + [text(19), text(3)]
    return [
        ask(
            str(i),
            prompt,
            max_tokens=14 + i if i < 5 else 4,
            ignore_eos=True,
            **({"temperature": 0.8, "seed": i, "n": 2} if i % 3 == 1 else {}),
        )
        for i, prompt in enumerate(prompts)
    ]


def note_plans(engine: Engine) -> list[tuple[SharedPrefix | None, ForwardBatch]]:
    """Every forward's plan and batch, as the cache prepares them; free memory is NaN from now on, where it can."""
    seen: list = []
    prepare = engine.kv.prepare

    def noting(batch: ForwardBatch, scheduled: Scheduled) -> None:
        prepare(batch, scheduled)
        if engine.config.kernel == "reference":  # the CPU kernel lays its memory out in its own way
            poison_free_memory(engine)
        seen.append((batch.attention_plan, batch))

    engine.kv.prepare = noting
    return seen


@pytest.mark.parametrize(
    ("family", "kernel"), [*((family, "reference") for family in FAMILIES), ("llama", "cpu")]
)
def test_same_tokens(family: str, kernel: str) -> None:
    """In float64 every answer is the same with and without, whoever shares with whom in each forward."""
    model = decoder(family)
    sharing, plain = (engine_with(least, model, kernel=kernel) for least in (ON, OFF))
    plans, none = note_plans(sharing), note_plans(plain)
    said, expected = run(sharing, agents()), run(plain, agents())
    for request in agents():
        for index in range(request.params.n):
            got, want = (tokens(outputs[request.request_id], index) for outputs in (said, expected))
            assert got == want
            assert len(got) == request.params.max_tokens
    check_drained(sharing)
    assert all(plan is None for plan, _ in none)
    made = [(plan, batch) for plan, batch in plans if plan is not None]
    assert any(len(plan.prefix.context_lens) > 1 for plan, _ in made), "several tiles or groups were meant"
    assert any(plan.rest is None for plan, _ in made), "all share"
    assert any(max(batch.query_lens) > 1 for _, batch in made), "a chunk beside decodes that share"


def test_after_lost_memory() -> None:
    """The same in a cache too small for all: sequences lose their blocks, and find their prefix again."""
    model = decoder("llama")
    sharing, plain = (engine_with(least, model, kv_tokens=92) for least in (ON, OFF))
    plans = note_plans(sharing)
    said, expected = run(sharing, agents()), run(plain, agents())
    assert sharing.stats.preemptions > 0
    assert any(plan is not None for plan, _ in plans)
    assert {name: tokens(outputs) for name, outputs in said.items()} == {
        name: tokens(outputs) for name, outputs in expected.items()
    }


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-4), (torch.bfloat16, 0.25)], ids=str)
@torch.inference_mode()
def test_logits_stay_close(dtype: torch.dtype, atol: float) -> None:
    """A forward's logits with and without a plan, in lower precision."""
    model = decoder("llama", dtype)
    engine = engine_with(ON, model)
    plans = note_plans(engine)
    execute, compared = engine.executor.execute, 0

    def twice(scheduled: Scheduled) -> list:
        nonlocal compared
        out = execute(scheduled)
        plan, batch = plans[-1]
        if plan is not None:
            logits = model.forward(batch, engine.kv)
            batch.attention_plan = None
            torch.testing.assert_close(logits, model.forward(batch, engine.kv), rtol=0, atol=atol)
            compared += 1
        return out

    engine.executor = SimpleNamespace(execute=twice)
    run(engine, agents())
    assert compared > 5


def rule_of(device: str, heads: int, kv_heads: int, dtype: torch.dtype, **shape: object) -> SharingRule:
    """The rule for some model in blocks of 16."""
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": 64, "sliding_windows": ()} | shape
    model = SimpleNamespace(config=SimpleNamespace(**sizes), device=torch.device(device), dtype=dtype)
    return SharingRule.of(model, 16)


def test_windows_decide() -> None:
    """Nothing is planned where every layer has a window; one layer without is enough to."""
    assert rule_of("cuda", 8, 8, torch.float16, sliding_windows=(9, 9)).least_saved == math.inf
    assert rule_of("cuda", 8, 8, torch.float16, sliding_windows=(9, None)).least_saved < math.inf


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype", "tile"),
    [
        (9, 3, 64, torch.float16, 42),
        (32, 8, 128, torch.bfloat16, 32),
        (8, 1, 256, torch.float16, 2),
        (9, 3, 64, torch.float32, 5),
        (71, 1, 64, torch.float32, 1),
    ],
)
def test_tiles_fit_the_gpu_kernel(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, tile: int
) -> None:
    """The heads of a tile fill the rows that the Triton kernel is launched with, and no more."""
    assert rule_of("cuda", heads, kv_heads, dtype, head_dim=head_dim).tile == tile
