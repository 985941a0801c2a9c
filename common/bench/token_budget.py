"""Somebody sends a long prompt while others are being answered: what the token budget does to both."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from rich.progress import Progress

from common.bench.workloads import make_trace
from common.config import EngineConfig
from common.generate import drive
from common.protocol import Engine, Model, Request
from common.sampling_params import SamplingParams
from common.stages import find_stage

USERS = 8  # being answered when the long prompt comes
BEFORE, AFTER = 12, 40  # tokens of each of their answers before and after that


@dataclass(frozen=True)
class Arrived:
    """What one arrival did: gaps between the users' tokens, and the newcomer's time to its first."""

    gaps_s: list[float]
    first_token_s: float
    forwards: int  # from the arrival to that first token


def measure_budgets(
    stage: str, model: Model, kernel: str, budgets: Iterable[int], long_prompt: int, runs: int, bars: Progress
) -> dict[str, Any]:
    """For each budget: the users' inter-token latency while the prompt is computed, and its TTFT.

    Returns:
        Budget (as text) -> median over runs of `itl_p50_s`, `itl_max_s`, `ttft_s`, `forwards`.
    """
    budgets = list(budgets)
    bar = bars.add_task("token budgets", total=len(budgets) * runs, note="")
    seen: dict[str, list[Arrived]] = {str(budget): [] for budget in budgets}
    arrive(_engine(stage, model, kernel, max(budgets), long_prompt), long_prompt)  # warm
    for number in range(runs):
        for budget in budgets if number % 2 == 0 else budgets[::-1]:
            bars.update(bar, note=f"budget {budget}")
            seen[str(budget)].append(arrive(_engine(stage, model, kernel, budget, long_prompt), long_prompt))
            bars.advance(bar)
    return {
        budget: {
            "itl_p50_s": median(float(np.percentile(one.gaps_s, 50)) for one in found),
            "itl_max_s": median(max(one.gaps_s) for one in found),
            "ttft_s": median(one.first_token_s for one in found),
            "forwards": median(one.forwards for one in found),
        }
        for budget, found in seen.items()
    }


def arrive(engine: Engine, long_prompt: int) -> Arrived:
    """Let the users' answers begin, add the long prompt, and watch until it has its first token."""
    ids = make_trace("uniform", USERS + 1, vocab_size=engine.model.config.vocab_size)
    params = SamplingParams(temperature=0.0, max_tokens=BEFORE + AFTER + long_prompt, ignore_eos=True)
    users = [Request(f"user {i}", ids[i].prompt_token_ids[:16], params) for i in range(USERS)]
    long_ids = (ids[USERS].prompt_token_ids * (1 + long_prompt // 100))[:long_prompt]
    newcomer = Request("newcomer", long_ids, SamplingParams(temperature=0.0, max_tokens=1))
    said = 0
    came = first = 0.0
    forwards_at_arrival = forwards = 0
    last: dict[str, float] = {}
    gaps: list[float] = []
    for outputs in drive(engine, users):
        now = time.perf_counter()
        for output in outputs:
            if output.request_id == newcomer.request_id:
                first, forwards = now - came, engine.stats.forwards - forwards_at_arrival
            elif came and not first and output.request_id in last:
                gaps.append(now - last[output.request_id])
            last[output.request_id] = now
            said += len(output.new_token_ids)
        if not came and said >= USERS * BEFORE:
            engine.add_request(newcomer)
            came, forwards_at_arrival = time.perf_counter(), engine.stats.forwards
        if first:
            break
    for request in [*users, newcomer]:
        engine.abort(request.request_id)
    return Arrived(gaps, first, forwards)


def _engine(stage: str, model: Model, kernel: str, budget: int, long_prompt: int) -> Engine:
    tokens = 2 * long_prompt + 4096
    config = EngineConfig(
        kv_bytes=model.config.kv_bytes_per_token(model.dtype) * tokens,
        max_model_len=min(tokens, model.config.max_position_embeddings),
        max_num_seqs=USERS + 1,
        max_num_batched_tokens=budget,
        kernel=kernel,  # type: ignore[arg-type]  # checked by EngineConfig
    )
    return find_stage(stage)[1].resolve()(model, config)
