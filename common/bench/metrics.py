"""The figures of a run: speed, waiting times, places taken, memory.  Names are the field's own."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import asdict
from statistics import fmean
from typing import Any

import numpy as np

from common.bench.memory import mean_split, split_steps
from common.bench.record import Run


def summarise(run: Run) -> dict[str, Any]:
    """All figures of a run as plain numbers.

    * `output_tok_s`, `total_tok_s`: answer tokens, and prompt + answer tokens, per second.
    * `ttft_s`: time to first token, from adding the request; `tpot_s`: time per further token of an answer.
      Both as p50, p95, p99, mean over sequences.
    * `running`: sequences per forward (peak, mean); `running_while_others_wait`: the mean over forwards with
      a queue; `occupancy` and `occupancy_while_others_wait`: the means as shares of the batch's places.
    * `kv`: bytes per slot state (peak and mean over forwards), see `kv_figures`; None without KV memory.

    Counters are the engine's own (`EngineStats`).
    """
    stats, seconds = run.stats, run.seconds
    running = [len(step.computed) for step in run.steps]
    loaded = [len(step.computed) for step in run.steps if step.waiting] or running
    first = [times[0] - run.added[key[0]] for key, times in run.token_times.items() if times]
    between = [
        (times[-1] - times[0]) / (len(times) - 1) for times in run.token_times.values() if len(times) > 1
    ]
    return {
        "seconds": seconds,
        "output_tok_s": stats.tokens_emitted / seconds if seconds else 0.0,
        "total_tok_s": (stats.tokens_emitted + stats.prompt_tokens) / seconds if seconds else 0.0,
        "ttft_s": percentiles(first),
        "tpot_s": percentiles(between),
        "computed_per_emitted": stats.computed_per_emitted,
        "running": {"peak": max(running, default=0), "mean": fmean(running) if running else 0.0},
        "running_while_others_wait": fmean(loaded) if loaded else 0.0,
        "occupancy_while_others_wait": fmean(loaded) / run.max_num_seqs if loaded else 0.0,
        "occupancy": 1 - stats.idle_slot_steps / stats.slot_steps if stats.slot_steps else 0.0,
        "counters": asdict(stats),
        "kv": kv_figures(run),
    }


def kv_figures(run: Run) -> dict[str, Any] | None:
    """KV memory of a run in bytes: capacity; reserved and live, peak and mean over forwards; the split.

    `live` is what unfinished sequences have stored (`Split.token_states`).  `split` holds shares of the
    capacity, averaged over the forwards during which requests waited.
    """
    if not run.steps or not run.steps[0].usage.capacity:
        return None
    per_token = run.steps[0].usage.bytes_per_token
    reserved = [step.usage.reserved * per_token for step in run.steps]
    figures: dict[str, Any] = {
        "capacity_bytes": run.steps[0].usage.capacity * per_token,
        "bytes_per_token": per_token,
        "reserved_bytes": {"peak": max(reserved), "mean": fmean(reserved)},
    }
    if any(step.spans for step in run.steps):
        live = [split.token_states * per_token for split in split_steps(run).values()]
        split = mean_split(run)
        assert split is not None  # there is capacity
        figures["live_bytes"] = {"peak": max(live), "mean": fmean(live)}
        figures["split"] = asdict(split.share)
        figures["efficiency"] = split.efficiency
    return figures


def percentiles(values: Seq[float]) -> dict[str, float]:
    """p50, p95, p99 (linear between values) and mean; empty for no values."""
    if not values:
        return {}
    p50, p95, p99 = (float(value) for value in np.percentile(values, (50, 95, 99)))
    return {"p50": p50, "p95": p95, "p99": p99, "mean": fmean(values)}
