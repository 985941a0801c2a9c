"""`sixstage bench batching`: what deciding the batch anew at every step is worth, and what it costs.

Three experiments, stage 3 (static batches) against stage 4 (continuous) with the same memory and kernels:

* **Throughput and waiting** on real lengths, requests coming all at once, one by one, and in bursts.
* **The slot timeline**: a handful of requests, every forward drawn.
* **The token budget**: users who are being answered while somebody sends a long prompt; how a smaller budget
  per step keeps their tokens coming, and how it delays the long prompt's own first token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console

from common.bench.arrivals import Arrival
from common.bench.batching_report import batching_report
from common.bench.harness import new_console, pick_stages, progress, run_stage
from common.bench.job import Job
from common.bench.record import Run
from common.bench.report import publish
from common.bench.report_events import events
from common.bench.run_stage import collect, run_all
from common.bench.token_budget import measure_budgets
from common.bench.workloads import trace_hash
from common.config import EngineConfig
from common.errors import InvalidValue
from common.model.loader import load_model, read_config, resolve, resolve_dtype
from common.protocol import Model, Request
from common.sampling_params import SamplingParams

LOAD = 0.8  # arrivals per second, as a share of what the continuous stage serves when all come at once
ARRIVALS: tuple[Arrival, ...] = ("poisson", "burst")


@dataclass(frozen=True)
class Scale:
    """How much of the experiment is done."""

    requests: int  # all at once: many, as the last sixteen empty a continuous batch like a static one
    arriving: int  # over time
    places: int  # at most; what the caller asked for, if that is less
    longest: int | None  # prompts and answers are cut to this
    naive_requests: int  # the first so many of them, for the stage that recomputes everything,
    naive_longest: int  # with prompts and answers cut to this: a favour, as its tokens get ever dearer
    runs: int
    budgets: tuple[int, ...]
    long_prompt: int


FULL = Scale(128, 64, 1024, None, 2, 128, 3, (16, 32, 64, 128, 256, 512, 2048), 1500)  # a quarter of an hour
QUICK = Scale(10, 10, 4, 32, 1, 24, 1, (16, 64, 512), 200)


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
    """Compare static and continuous batching; print and save the comparison.

    Args:
        stages: names or numbers; None takes 1, 3 and 4.
        model: see `common.model.loader.resolve`.
        dtype: to compute in.
        kv_bytes: KV memory of each stage.
        max_num_seqs: places in a batch.
        kernel: attention kernel of the paged stages.
        json: write all figures to this file as well.
        quick: fewer and shorter requests.
        out: folder for `batching.html`, `batching.md` and `batching.json`.

    Returns:
        What the JSON holds: environment, and the figures of `at_once`, `poisson`, `burst` and `budgets`.

    Raises:
        SixstageError: a value or the model cannot be used, a run failed, a file cannot be written.
    """
    names, console = pick_stages((1, 3, 4) if stages is None else stages), new_console()
    if names[-1] < "stage4":
        raise InvalidValue("stages", names, "at least one that batches continuously (stage 4 on)")
    scale = QUICK if quick else FULL
    config, compute = read_config(resolve(model)), resolve_dtype(dtype, torch.device("cpu"))
    base = Job("", model, dtype, num_requests=scale.requests, longest=scale.longest, kv_bytes=kv_bytes,
               max_num_seqs=min(max_num_seqs, scale.places), kernel=kernel)  # fmt: skip
    results: dict[str, Any] = {
        "environment": base.environment(compute, trace_hash(base.trace(config.vocab_size)), names),
        **_under_load(base, names, scale, console),
    }
    loaded = load_model(model, dtype=dtype)
    timelines = {name: record_timeline(name, loaded, kernel) for name in names if name != "stage1_naive"}
    results["timeline"] = {name: timeline_figures(recorded) for name, recorded in timelines.items()}
    results["events"] = {name: events(recorded) for name, recorded in timelines.items()}
    with progress(console) as bars:
        by_budget = measure_budgets(
            names[-1], loaded, kernel, scale.budgets, scale.long_prompt, scale.runs, bars
        )
    results["budgets"] = {"prompt_tokens": scale.long_prompt, "by_budget": by_budget}
    report = batching_report(results, timelines)
    publish(report, console, out, "batching", json)
    return results


def _under_load(base: Job, names: list[str], scale: Scale, console: Console) -> dict[str, Any]:
    """All at once first; its speed sets the rate of the other two."""
    jobs = {name: replace(base, stage=name) for name in names}
    if "stage1_naive" in jobs:  # minutes per request: a part of the trace tells its speed as well
        jobs["stage1_naive"] = replace(
            jobs["stage1_naive"], num_requests=scale.naive_requests, longest=scale.naive_longest
        )
    done = {"at_once": collect(run_all(jobs, scale.runs, console), same_trace=False)}
    fastest = done["at_once"]["stages"][names[-1]]["median"]
    rate = LOAD * scale.requests / fastest["seconds"]
    for kind in ARRIVALS:
        arriving = {
            name: replace(job, num_requests=scale.arriving, arrival=kind, rate=rate)
            for name, job in jobs.items()
            if name != "stage1_naive"
        }
        done[kind] = collect(run_all(arriving, 1, console)) | {"requests_per_s": rate}
    return done


def record_timeline(stage: str, model: Model, kernel: str) -> Run:
    """Seven requests through three places, each forward recorded: answers of 4 to 22 tokens."""
    config = EngineConfig(
        kv_bytes=model.config.kv_bytes_per_token(model.dtype) * 1024,
        max_model_len=256,
        max_num_seqs=3,
        kernel=kernel,  # type: ignore[arg-type]  # checked by EngineConfig
    )
    lengths = {"A": 4, "B": 22, "C": 9, "D": 6, "E": 12, "F": 5, "G": 8}
    token = model.config.vocab_size // 2
    requests = [
        Request(name, (token,) * (3 + i), SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True))
        for i, (name, n) in enumerate(lengths.items())
    ]
    return run_stage(stage, model, config, requests)


def timeline_figures(recorded: Run) -> dict[str, Any]:
    """Forwards, idle places and the order in which requests ended."""
    return {
        "forwards": recorded.stats.forwards,
        "idle_slot_steps": recorded.stats.idle_slot_steps,
        "finish_order": [key[0] for step in recorded.steps for key in step.finished],
        "mean_finish_forward": fmean(
            number + 1 for number, step in enumerate(recorded.steps) for _ in step.finished
        ),
    }
