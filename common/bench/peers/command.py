"""The comparison itself: prepare everybody, run in alternating order, report."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from common.bench.environment import environment
from common.bench.harness import new_console, progress
from common.bench.peers.environments import RUNNERS, PeerMissing, prepare
from common.bench.peers.figures import Cell
from common.bench.peers.process import CutOff, Ended, OnProgress, PeerJob, RunFailed, run_peer
from common.bench.peers.registry import Contender, pick_own, pick_peers
from common.bench.peers.report import peers_report
from common.bench.peers.workloads import (
    HIGH_ID,
    WORKLOADS,
    count_tokens,
    make_requests,
    pick_workloads,
)
from common.bench.report import publish
from common.bench.roofline import measure as measure_roofline
from common.bench.run_stage import rounds
from common.errors import InvalidValue
from common.files import write_file
from common.model.config import ModelConfig
from common.model.loader import read_config, resolve, resolve_dtype

FLOOR_OF = "W3"  # a lone user's tokens cannot come faster than the weights can be read
FLOOR_ROUNDS = 9


@dataclass(frozen=True)
class Ready:
    """A contender that can run."""

    contender: Contender
    python: Path
    model: str


@dataclass(frozen=True)
class Settings:
    """How much is done, and with what.

    Attributes:
        kv_bytes: KV memory of each engine.
        max_num_seqs: most sequences in a batch.
        warm: runs of warming up in each process.
        runs: measured runs, each a process.
        limit: seconds for each run.
        quick: a few short requests of each workload.
    """

    kv_bytes: int = 2 << 30
    max_num_seqs: int = 64
    warm: int = 2
    runs: int = 3
    limit: float = 120.0
    quick: bool = False

    def __post_init__(self) -> None:
        for name, least in (("kv_bytes", 1), ("max_num_seqs", 1), ("warm", 0), ("runs", 1), ("limit", 1)):
            value = getattr(self, name)
            if not value >= least:
                raise InvalidValue(name, value, f"a number of at least {least}")


@dataclass(frozen=True)
class Plan:
    """What all runs have in common."""

    settings: Settings
    dtype: str
    high: int  # the highest token id

    def requests(self, workload: str, seed: int) -> list[dict[str, Any]]:
        """A workload's requests with the ids of this seed."""
        return make_requests(workload, seed, self.settings.quick, self.high)

    def job(self, workload: str, ready: Ready, cores: list[int]) -> PeerJob:
        """One process's job: the measured run comes last, with ids that those before it have not shown to a cache."""
        runs = [self.requests(workload, seed) for seed in (*range(1, self.settings.warm + 1), 0)]
        return PeerJob(
            model=ready.model,
            dtype=self.dtype,
            cores=cores,
            kv_bytes=self.settings.kv_bytes,
            max_model_len=max(len(one["prompt"]) + one["output"] for one in runs[0]),
            max_num_seqs=self.settings.max_num_seqs,
            runs=runs,
            options=dict(ready.contender.options),
        )


DEFAULT = Settings()

Do = Callable[[str, Ready, OnProgress], "Ended | CutOff"]
"""Runs a contender once on a workload."""


def run(
    stages: Iterable[str | int] | None = None,
    peers: Iterable[str] | None = None,
    workloads: Iterable[str] | None = None,
    model: str = "smollm2-135m",
    dtype: str = "auto",
    settings: Settings = DEFAULT,
    json: str | Path | None = None,
    out: str | Path = "reports",
) -> dict[str, Any]:
    """Run stages and peers on the same workloads; print and save the comparison.

    Every run is a process of its own that first serves other requests of the same lengths; every second round
    goes backwards.  Who takes longer than the limit is cut off and not asked again; who cannot be installed, or
    fails, is reported as missing.

    Args:
        stages: ours, by name or number (6 is the server); None takes all.
        peers: names of `PEERS`; None takes all, an empty list none.
        workloads: names of `WORKLOADS`; None takes all.
        model: see `common.model.loader.resolve`.
        dtype: to compute in, as far as an engine lets one choose.
        settings: see there.
        json: write all figures to this file as well.
        out: folder for `peers.html`, `peers.md` and `peers.json`.

    Returns:
        What the JSON holds: environment, workloads, contenders, missing, floor, and a cell per engine and workload.

    Raises:
        SixstageError: a value or the model cannot be used, a file cannot be written.
    """
    chosen, console = pick_workloads(workloads), new_console()
    contenders = pick_own(stages) | pick_peers(peers)
    folder = resolve(model)
    config, compute = read_config(folder), resolve_dtype(dtype, torch.device("cpu"))
    plan = Plan(settings, str(compute).removeprefix("torch."), min(HIGH_ID, config.vocab_size - 1))
    ready, missing = prepare_all(contenders, model, folder, plan.dtype, console)
    found = _measure(plan, chosen, ready, config, compute, console)
    results = {
        "environment": environment(model=model, dtype=plan.dtype, **vars(settings)),
        "workloads": {name: _about(name, plan) for name in chosen},
        "contenders": {name: _introduce(one, plan.dtype) for name, one in contenders.items()},
        "missing": missing,
        **found,
    }
    write_file(
        Path(out) / "peers.json", dumps(results, indent=1) + "\n"
    )  # first: an hour's figures are safe now
    publish(peers_report(results), console, out, "peers", json)
    return results


def prepare_all(
    contenders: dict[str, Contender], model: str, folder: Path, dtype: str, console: Console
) -> tuple[dict[str, Ready], dict[str, str]]:
    """Install and convert what is needed; (who can run, name -> why not)."""
    ready, missing = {}, {}
    for name, one in contenders.items():
        with console.status(f"{name}: preparing") as status:
            try:
                python, path = prepare(name, one, model, folder, dtype, status.update)
            except PeerMissing as reason:
                missing[name] = str(reason)
                console.print(f"{name}: missing: {reason}", markup=False)
            else:
                ready[name] = Ready(one, python, path)
    return ready, missing


def _measure(
    plan: Plan,
    chosen: list[str],
    ready: dict[str, Ready],
    config: ModelConfig,
    dtype: torch.dtype,
    console: Console,
) -> dict[str, Any]:
    """All cells, the versions that were met, and the floor."""
    cores = usable_cores()
    versions: dict[str, dict[str, str]] = {}

    def do(workload: str, one: Ready, on_progress: OnProgress) -> Ended | CutOff:
        job, isolated = plan.job(workload, one, cores), one.contender.environment is not None
        return run_peer(
            one.python, RUNNERS / one.contender.runner, job, plan.settings.limit, on_progress, isolated
        )

    cells: dict[str, dict[str, Any]] = {}
    with progress(console) as bars:
        for workload in chosen:
            found = measure_workload(workload, ready, plan.settings.runs, do, bars, versions)
            cells[workload] = {name: cell.to_json() for name, cell in found.items()}
    floor = floor_figures(config, dtype) if FLOOR_OF in chosen else None
    return {"versions": versions, "floor": floor, "cells": cells}


def measure_workload(
    workload: str,
    ready: dict[str, Ready],
    runs: int,
    do: Do,
    bars: Progress,
    versions: dict[str, dict[str, str]],
) -> dict[str, Cell]:
    """Run everybody on one workload, in rounds of alternating direction.

    Args:
        workload: its name.
        ready: who takes part.
        runs: rounds.
        do: one run.
        bars: where progress is shown.
        versions: name -> what its packages say, filled in here.
    """
    cells = {name: Cell() for name in ready}
    for number, name in rounds(list(ready), runs):
        cell = cells[name]
        if cell.closed:
            continue
        bar = bars.add_task(f"{workload} {name}, run {number + 1} of {runs}", total=None, note="loading")

        def show(what: str, tokens: int, bar: Any = bar) -> None:
            bars.update(bar, completed=tokens, note=f"tokens, {what}")

        try:
            outcome = do(workload, ready[name], show)
        except RunFailed as error:
            cell.failed = str(error)
            bars.update(bar, total=1, completed=0, note="failed")
            continue
        cell.add(outcome)
        versions[name] = outcome.versions
        note = "cut off" if cell.cut_off else f"{cell.runs[-1]['output_tok_s']:.1f} tok/s"
        bars.update(bar, total=1, completed=1, note=note)
    return cells


def floor_figures(config: ModelConfig, dtype: torch.dtype) -> dict[str, float]:
    """The least milliseconds per token of a lone user: reading all weights, and the linear layers alone."""
    found = measure_roofline(config, dtype, rows=(1,), rounds=FLOOR_ROUNDS)
    return {
        "weight_bytes": found.weight_bytes,
        "read_bytes_per_second": found.read_bandwidth,
        "read_ms": 1e3 * found.weight_bytes / found.read_bandwidth,
        "linear_ms": 1e3 * found.points[0].floor,
    }


def usable_cores() -> list[int]:
    """Numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _about(name: str, plan: Plan) -> dict[str, Any]:
    """A workload as the report names it."""
    prompt, answer = count_tokens(plan.requests(name, 0))
    workload = WORKLOADS[name]
    return {
        "about": workload.about,
        "unit": workload.headline.unit,
        "prompt_tokens": prompt,
        "answer_tokens": answer,
    }


def _introduce(one: Contender, dtype: str) -> dict[str, Any]:
    return {
        "about": one.about,
        "dtype": one.stores or dtype,
        "ours": one.runner in ("run_stage.py", "run_server.py"),
    }
