"""`sixstage bench`: stages side by side on one trace, each run in a fresh process, in alternating order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from common.bench.bench_report import bench_report
from common.bench.harness import new_console, pick_stages, progress
from common.bench.job import Job, run_fresh
from common.bench.report import publish
from common.errors import InvalidValue
from common.model.loader import read_config, resolve

NUM_REQUESTS = 8  # the first stage recomputes everything, and all stages serve the same trace
QUICK_REQUESTS, QUICK_LONGEST = 4, 32


def bench(
    stages: Iterable[str | int] | None = None,
    model: str = "smollm2-135m",
    dtype: str = "auto",
    kv_bytes: int = 256 << 20,
    num_requests: int = NUM_REQUESTS,
    runs: int = 3,
    json: str | Path | None = None,
    quick: bool = False,
    out: str | Path = "reports",
    **options: Any,
) -> dict[str, Any]:
    """Serve one trace with each stage several times; print and save medians with their spread.

    Every run is a process of its own, and every second round goes through the stages backwards, so that a
    machine that slows down does not favour whoever comes first.

    Args:
        stages: names or numbers; None takes all in the registry.
        model: see `common.model.loader.resolve`.
        dtype: to compute in.
        kv_bytes: KV memory of each stage.
        num_requests: of the trace.
        runs: of each stage.
        json: write all figures to this file as well.
        quick: one run of a few short requests.
        out: folder for `bench.html`, `bench.md` and `bench.json`.
        options: any other field of `Job`: workload, bound, max_num_seqs, block_size, reservation, kernel ...

    Returns:
        What the JSON holds: environment, trace hash, and per stage the median, least and greatest of every
        figure, and all runs.

    Raises:
        SixstageError: a value or the model cannot be used, a run failed, a file cannot be written.
    """
    names, console = pick_stages(stages), new_console()
    if runs < 1:
        raise InvalidValue("runs", runs, "an integer of at least 1")
    job = Job("", model, dtype, num_requests=num_requests, kv_bytes=kv_bytes, **options)
    if quick:
        job, runs = replace(job, num_requests=min(num_requests, QUICK_REQUESTS), longest=QUICK_LONGEST), 1
    job.engine_config()  # refuse a wrong value before anything is started
    vocab_size = read_config(resolve(model)).vocab_size  # fetches the model here, where the user sees it
    job.trace(vocab_size)
    done = run_all({name: replace(job, stage=name) for name in names}, runs, console)
    results = collect(done) | {"events": {name: found[0]["events"] for name, found in done.items()}}
    report = bench_report(results)
    publish(report, console, out, "bench", json)
    return results


def run_all(
    jobs: Mapping[str, Job],
    runs: int,
    console: Console,
    do: Callable[..., dict[str, Any]] = run_fresh,
) -> dict[str, list[dict[str, Any]]]:
    """Do each job `runs` times, in rounds of alternating direction.

    Args:
        jobs: label -> job.
        runs: rounds.
        console: for the progress bars.
        do: how to do one job.

    Returns:
        Label -> its results, one per round.
    """
    results: dict[str, list[dict[str, Any]]] = {label: [] for label in jobs}
    with progress(console) as bars:
        for number, label in rounds(list(jobs), runs):
            bar = bars.add_task(f"{label}, run {number + 1} of {runs}", total=None, note="loading")

            def show(tokens: int, total: int, bar: Any = bar) -> None:
                bars.update(bar, completed=tokens, total=total, note="tokens")

            result = do(jobs[label], show)
            bars.update(bar, note=f"tokens, {result['figures']['output_tok_s']:.1f} tok/s")
            results[label].append(result)
    return results


def rounds(labels: Seq[str], runs: int) -> list[tuple[int, str]]:
    """(round, label) in the order of running: forwards, backwards, forwards, ..."""
    return [(number, label) for number in range(runs) for label in (labels, labels[::-1])[number % 2]]


def collect(done: Mapping[str, Seq[Mapping[str, Any]]], same_trace: bool = True) -> dict[str, Any]:
    """Medians and spread of each stage's runs.

    Args:
        done: what `run_all` returns.
        same_trace: insist on it; otherwise `trace_hash` is the first run's.

    Raises:
        ValueError: the runs did not serve the same trace.
    """
    hashes = {result["trace_hash"] for results in done.values() for result in results}
    if same_trace and len(hashes) != 1:
        raise ValueError(f"runs of different traces cannot be compared: {sorted(hashes)}")
    first = next(iter(done.values()))[0]
    stages = {}
    for label, results in done.items():
        figures = [result["figures"] for result in results]
        stages[label] = {
            "median": merge(figures, median),
            "min": merge(figures, min),
            "max": merge(figures, max),
            "runs": figures,
        }
    environment = {key: value for key, value in first["environment"].items() if key != "stage"}
    return {"environment": environment, "trace_hash": first["trace_hash"], "stages": stages}


def merge(values: Seq[Any], how: Callable[[Seq[float]], float]) -> Any:
    """Apply `how` number by number to dicts of the same form; what is no number is taken from the first."""
    first = values[0]
    if isinstance(first, dict):
        return {key: merge([value[key] for value in values], how) for key in first}
    return how(values) if isinstance(first, (int, float)) else first
