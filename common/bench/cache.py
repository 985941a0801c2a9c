"""`sixstage bench cache`: what remembering K/V is worth, and what a contiguous reservation costs.

* **Speed**, with the real model, each run in a fresh process (`quick`: in this one): the stage that recomputes
  everything, the cache with one request at a time, and the cache with a batch.
* **Growth**: one request, forward by forward: what was computed, and what was read.
* **The tail** of static batches and **one moment of the slab**, on real lengths, without a model: the stage's own
  engine and allocator, replayed by an executor that only counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from common.bench.cache_report import cache_report
from common.bench.capacity import CONTEXT, PLACES, SLOTS, TOKENS, count, systems
from common.bench.harness import new_console, pick_stages, run_stage
from common.bench.job import Job, run_fresh, run_here
from common.bench.metrics import summarise
from common.bench.record import Key, Run, StepRecord
from common.bench.replay import Replay
from common.bench.report import publish
from common.bench.report_events import events
from common.bench.run_stage import collect, run_all
from common.bench.scripted import CountingExecutor, ShapeOnly
from common.bench.workloads import trace_hash
from common.course.pictures import Piece, Slab
from common.errors import InvalidValue
from common.model.config import ModelConfig
from common.model.loader import read_config, resolve, resolve_dtype

CACHED = "stage2_kvcache"
ALONE = f"{CACHED}, one at a time"
GROWN = (12, 20)  # tokens of prompt and answer whose growth is drawn


@dataclass(frozen=True)
class Scale:
    """How much of the experiment is done."""

    requests: int  # with the real model
    longest: int  # their prompts and answers are cut to this
    runs: int
    counted: int  # requests of the tail and of the slab
    fresh: bool  # each run of the real model in a process of its own


FULL = Scale(8, 48, 3, 64, True)  # about three minutes
QUICK = Scale(3, 16, 1, 20, False)


def run(
    stages: Iterable[str | int] | None = None,
    model: str = "smollm2-135m",
    dtype: str = "auto",
    kv_bytes: int = 512 << 20,
    max_num_seqs: int = 16,
    kernel: str = "auto",
    json: str | Path | None = None,
    quick: bool = False,
    out: str | Path = "reports",
) -> dict[str, Any]:
    """Compare a stage without a cache with one that has it; print and save the comparison.

    Args:
        stages: names or numbers, stage 2 among them; None takes 1 and 2.
        model: see `common.model.loader.resolve`.
        dtype: to compute in; it sets the bytes per token.
        kv_bytes: KV memory in the runs with the real model.
        max_num_seqs: places in a batch.
        kernel: of paged stages, should one be asked for.
        json: write all figures to this file as well.
        quick: fewer and shorter requests.
        out: folder for `cache.html`, `cache.md` and `cache.json`.

    Returns:
        What the JSON holds: environment, and the figures of `speed`, `tail` and `moment`,
        and the `events` of the runs that can be stepped through.

    Raises:
        SixstageError: a value or the model cannot be used, a run failed, a file cannot be written.
    """
    names, console, scale = (
        pick_stages((1, 2) if stages is None else stages),
        new_console(),
        QUICK if quick else FULL,
    )
    if CACHED not in names:
        raise InvalidValue("stages", names, f"{CACHED} among them")
    config, compute = read_config(resolve(model)), resolve_dtype(dtype, torch.device("cpu"))
    base = Job("", model, dtype, num_requests=scale.requests, longest=scale.longest, kv_bytes=kv_bytes,
               max_num_seqs=max_num_seqs, kernel=kernel)  # fmt: skip
    jobs = {}
    for name in names:
        if name == CACHED:
            jobs[ALONE] = replace(base, stage=name, max_num_seqs=1)
        jobs[name] = replace(base, stage=name)
    counted = replace(base, stage=CACHED, kernel="reference", num_requests=scale.counted, longest=None)
    slab_job = replace(counted, kv_bytes=SLOTS * config.kv_bytes_per_token(compute), max_model_len=CONTEXT,
                       max_num_seqs=PLACES, max_num_batched_tokens=TOKENS)  # fmt: skip
    tail = count(replace(counted, bound="exact", kv_bytes=64 << 30), config, compute)
    slabs = {label: slab_at(*middle(count(replace(slab_job, **what), config, compute)))
             for label, what in systems([CACHED]).items()}  # fmt: skip
    growth = {name: grow(name, config, compute) for name in names}
    results = {
        "environment": base.environment(compute, trace_hash(base.trace(config.vocab_size)), names),
        "kv_bytes_per_token": config.kv_bytes_per_token(compute),
        "speed": collect(run_all(jobs, scale.runs, console, run_fresh if scale.fresh else run_here)),
        "tail": tail_figures(tail),
        "moment": {label: slab_figures(slab) | {"slab": asdict(slab)} for label, slab in slabs.items()},
        "events": {name: events(recorded) for name, recorded in {**growth, "tail": tail}.items()},
    }
    publish(cache_report(results, growth, tail), console, out, "cache", json)
    return results


def grow(stage: str, config: ModelConfig, dtype: torch.dtype) -> Run:
    """One request of `GROWN` tokens, recorded forward by forward."""
    prompt, answer = GROWN
    job = Job(stage, kernel="reference", num_requests=1)
    replay = Replay(job.trace(config.vocab_size), config)
    request = replace(replay.first[0], prompt_token_ids=replay.first[0].prompt_token_ids[:1] * prompt)
    replay.lengths["0"] = answer
    return run_stage(
        stage, ShapeOnly(config, dtype), job.engine_config(), [request],
        wrap=lambda _: replay.script(CountingExecutor()), warm=False,
    )  # fmt: skip


def tail_figures(recorded: Run) -> dict[str, Any]:
    """Places that stood idle in static batches, and how long the longest member of each kept the others."""
    figures = summarise(recorded)
    sizes = [len(step.computed) for step in recorded.steps]
    return {
        "requests": len(recorded.added),
        "places": recorded.max_num_seqs,
        "forwards": len(sizes),
        "occupancy": figures["occupancy"],
        "alone": sum(size == 1 for size in sizes) / len(sizes),  # share of forwards for a single sequence
        "computed_per_emitted": figures["computed_per_emitted"],
    }


def middle(recorded: Run) -> tuple[Run, int]:
    """A run, and the forward in the middle of its first batch: the one at which half of its tokens are out."""
    first_batch = next(
        (n for n, step in enumerate(recorded.steps) if n and step.computed[0].num_new > 1),
        len(recorded.steps),
    )
    sizes = [len(step.computed) for step in recorded.steps[:first_batch]]
    passed = 0
    for number, size in enumerate(sizes):
        passed += size
        if 2 * passed >= sum(sizes):
            return recorded, number
    raise ValueError("a run without a forward has no middle")


def slab_at(recorded: Run, forward: int) -> Slab:
    """What each stretch holds after a forward; what it will hold is read from the forwards that follow."""
    step = recorded.steps[forward]
    last = {(part.request_id, part.index): part.context for s in recorded.steps for part in s.computed}
    ended = {key for s in recorded.steps[:forward] for key in s.finished}
    pieces = []
    for span in step.spans:
        key = (span.request_id, span.index)
        stored = 0 if key in ended else _context(step, key)
        later = 0 if key in ended else last[key] - stored
        pieces.append(Piece(span.start, stored, later, span.reserved - stored - later))
    return Slab(step.usage.capacity, tuple(pieces), step.waiting > 0)


def slab_figures(slab: Slab) -> dict[str, int]:
    """Requests in memory, and the slots of each kind."""
    kinds = {kind: sum(asdict(p)[kind] for p in slab.pieces) for kind in ("stored", "later", "never")}
    free = slab.capacity - sum(kinds.values())
    return {"requests": len(slab.pieces), "capacity": slab.capacity, **kinds, "free": free}


def _context(step: StepRecord, key: Key) -> int:
    """Tokens of an unfinished sequence after the forward."""
    return next(part.context for part in step.computed if (part.request_id, part.index) == key)
