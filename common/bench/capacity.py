"""`sixstage bench capacity`: the same requests, the same KV bytes; how many fit, and what fills the memory.

Two experiments on one trace of real lengths:

* **Memory**, without a model: the stages' own engines and allocators, replayed over hundreds of requests
  by an executor that only counts.  Places and token budget are so high that memory alone decides.
* **Speed**, with the real model, over fewer requests, each run in a fresh process (`quick`: in this one).

How long an answer gets is not known when a request comes in, so no engine is told.  The trace ends each
answer by an end-of-sequence token (`common.bench.scripted`); an engine knows the `max_tokens` that a client
sent.  For stage 2 that makes three systems, those of the PagedAttention paper's Fig. 2: the client bounds
nothing (`context`; "Orca (Max)"), bounds its answer by the next power of two (`pow2`), or by its true length,
which nobody can know (`exact`; "Orca (Oracle)").  Paged stages do not look at the bound at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from common.bench.block_picture import stop_in_the_middle
from common.bench.capacity_report import capacity_report
from common.bench.harness import new_console, pick_stages, progress, run_stage
from common.bench.job import Job, run_fresh, run_here
from common.bench.metrics import summarise
from common.bench.record import Run
from common.bench.replay import Replay
from common.bench.report import publish
from common.bench.run_stage import collect, run_all
from common.bench.scripted import CountingExecutor, ShapeOnly
from common.bench.workloads import trace_hash
from common.errors import InvalidValue
from common.model.config import ModelConfig
from common.model.loader import read_config, resolve, resolve_dtype

SLOTS = 15_728  # token slots of the paper's OPT-13B on a 40 GB GPU
CONTEXT = 2048
BLOCK_SIZES = (4, 8, 16, 32, 64, 128, 256)
PLACES, TOKENS = 1024, 1 << 20  # per batch and per forward: no limit
MEMORY_EVERY = 16  # forwards between two looks at memory


@dataclass(frozen=True)
class Scale:
    """How much of the experiment is done."""

    requests: int  # of the memory experiment
    block_sizes: tuple[int, ...]
    speed_requests: int
    speed_longest: int  # prompts and answers of the speed experiment are cut to this
    speed_context: int
    speed_slots: int
    runs: int
    fresh: bool  # each speed run in a process of its own


FULL = Scale(400, BLOCK_SIZES, 12, 256, 512, 2 * 512 + 256, 3, True)  # about a quarter of an hour
QUICK = Scale(200, (4, 16, 64), 6, 32, 96, 2 * 96 + 64, 1, False)


def run(
    stages: Iterable[str | int] | None = None,
    model: str = "smollm2-135m",
    dtype: str = "auto",
    kv_bytes: int | None = None,
    kernel: str = "auto",
    json: str | Path | None = None,
    quick: bool = False,
    out: str | Path = "reports",
) -> dict[str, Any]:
    """Compare how many requests the stages hold in the same KV memory; print and save the comparison.

    Args:
        stages: names or numbers; None takes all in the registry.  Stage 1 keeps nothing and is left out.
        model: see `common.model.loader.resolve`.
        dtype: to compute in; it sets the bytes per token.
        kv_bytes: KV memory of the memory experiment; None takes room for 15,728 tokens, the paper's number.
        kernel: attention kernel of the paged stages.
        json: write all figures to this file as well.
        quick: fewer and shorter requests.
        out: folder for `capacity.html`, `capacity.md` and `capacity.json`.

    Returns:
        What the JSON holds: environment, and the figures of `memory`, `block_sizes`, `speed` and `alone`.

    Raises:
        SixstageError: a value or the model cannot be used, a run failed, a file cannot be written.
    """
    names = [name for name in pick_stages(stages) if name != "stage1_naive"]
    if not names:
        raise InvalidValue("stages", stages, "at least one stage that keeps K/V")
    console, scale = new_console(), QUICK if quick else FULL
    config, compute = read_config(resolve(model)), resolve_dtype(dtype, torch.device("cpu"))
    per_token = config.kv_bytes_per_token(compute)
    base = Job("", model, dtype, num_requests=scale.requests, kv_bytes=kv_bytes or SLOTS * per_token,
               max_model_len=CONTEXT, kernel=kernel)  # fmt: skip
    counted = replace(base, kernel="reference", max_num_seqs=PLACES, max_num_batched_tokens=TOKENS)
    memory = {label: replace(counted, **what) for label, what in systems(names).items()}
    sweep = {size: replace(counted, **what) for size, what in block_sizes(names, scale).items()}
    results = {
        "environment": base.environment(compute, trace_hash(base.trace(config.vocab_size)), names),
        "memory": _count(memory, config, compute, console),
        "block_sizes": _count(sweep, config, compute, console),
        **_speed(base, names, scale, per_token, console),
        "blocks": _blocks(names, config, compute),
    }
    report = capacity_report(results)
    publish(report, console, out, "capacity", json)
    return results


def _blocks(names: Iterable[str], config: ModelConfig, dtype: torch.dtype) -> dict[str, Any] | None:
    """Block tables of the first paged stage at one moment; None where there is no such stage."""
    for name in names:
        if name != "stage2_kvcache":
            return {"stage": name, "tables": asdict(stop_in_the_middle(name, config, dtype))}
    return None


def systems(stages: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Label -> the job's fields that make the system: stage 2 three times, every later stage once."""
    found: dict[str, dict[str, Any]] = {}
    for stage in stages:
        if stage == "stage2_kvcache":
            found |= {
                "stage2, max length": {"stage": stage, "reservation": "max_model_len", "bound": "context"},
                "stage2, power of two": {"stage": stage, "bound": "pow2"},
                "stage2, true length": {"stage": stage, "bound": "exact"},
            }
        else:
            found[stage] = {"stage": stage, "bound": "context"}
    return found


def block_sizes(stages: Iterable[str], scale: Scale) -> dict[str, dict[str, Any]]:
    """Block size -> the job's fields: the first paged stage with each size."""
    paged = [stage for stage in stages if stage != "stage2_kvcache"][:1]
    return {
        str(size): {"stage": stage, "bound": "context", "block_size": size}
        for stage in paged
        for size in scale.block_sizes
    }


def count(job: Job, config: ModelConfig, dtype: torch.dtype, memory_every: int = 1) -> Run:
    """Replay a job's trace through its stage without a model.

    The engine, its allocator and its schedule are the real ones; only the tokens are not computed.

    Args:
        job: the stage, its limits and the trace.
        config: of the model that is not there.
        dtype: of its K/V.
        memory_every: forwards from one look at the memory to the next.
    """
    replay = Replay(job.trace(config.vocab_size), config)
    return run_stage(
        job.stage,
        ShapeOnly(config, dtype),
        job.engine_config(),
        replay.first,
        wrap=lambda _: replay.script(CountingExecutor()),
        follow=replay.follow,
        memory_every=memory_every,
        warm=False,
    )


def count_memory(job: Job, config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The figures of `count`, times left out."""
    recorded = count(job, config, dtype, MEMORY_EVERY)
    clocked = ("seconds", "output_tok_s", "total_tok_s", "ttft_s", "tpot_s")
    return {key: value for key, value in summarise(recorded).items() if key not in clocked}


def _count(
    jobs: Mapping[str, Job], config: ModelConfig, dtype: torch.dtype, console: Console
) -> dict[str, Any]:
    figures = {}
    with progress(console) as bars:
        bar = bars.add_task("counting memory", total=len(jobs), note="")
        for label, job in jobs.items():
            bars.update(bar, note=label)
            figures[label] = count_memory(job, config, dtype)
            bars.advance(bar)
    return figures


def _speed(base: Job, names: list[str], scale: Scale, per_token: int, console: Console) -> dict[str, Any]:
    """tok/s of every system on a smaller trace, of every block size, and with a single request.

    The single request shows what paging costs where it cannot gain: indirection without a neighbour.
    """
    small = replace(base, num_requests=scale.speed_requests, longest=scale.speed_longest, max_num_seqs=64,
                    max_model_len=scale.speed_context, kv_bytes=scale.speed_slots * per_token,
                    max_num_batched_tokens=8192)  # fmt: skip
    jobs = {label: replace(small, **what) for label, what in systems(names).items()}
    sweep = {size: replace(small, **what) for size, what in block_sizes(names, scale).items()}
    alone = {name: replace(small, stage=name, num_requests=1, bound="exact") for name in names}
    do = run_fresh if scale.fresh else run_here
    return {
        "speed": collect(run_all(jobs, scale.runs, console, do)),
        "speed_by_block_size": collect(run_all(sweep, scale.runs, console, do)) if sweep else None,
        "alone": collect(run_all(alone, scale.runs, console, do)),
    }
