"""`sixstage bench step`: what one step costs, where its time goes, and how near that is to the machine's best.

Three measurements in one process, everything that is compared in turn.  Of the steps that are timed the fastest
counts: whatever else a shared machine does can only make one slower.

* **By length**: the time of the next token of a lone request, for ever longer texts.
* **By part**: a step's time split by a clock around the engine's own calls: attention, the rest of the model,
  packing and sampling, the engine.
* **The roofline**: forwards of 1 to 64 tokens against read bandwidth and multiplications per second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from common.bench.environment import environment
from common.bench.harness import new_console, pick_stages, progress
from common.bench.profile_clock import clocked
from common.bench.report import publish
from common.bench.roofline import measure
from common.bench.step_report import roof_figures, step_report
from common.config import EngineConfig
from common.generate import drive
from common.model.loader import load_model
from common.output import OutputProcessor
from common.protocol import Engine, Model, Request
from common.sampling_params import SamplingParams
from common.stages import find_stage

PARTS = {
    "layers": ("linear", "small", "head"),
    "attention": ("attention",),
    "sampling": ("batch", "sampling"),
    "engine": ("scheduling", "booking", "text", "other"),
}
"""Part of a step -> those of `common.bench.profile_clock` that it is made of."""

SQUARE = 2048  # of the matrices that are multiplied to learn what the machine can do at best


@dataclass(frozen=True)
class Scale:
    """How much of the experiment is done."""

    lengths: tuple[int, ...]
    rounds: int
    batch: int  # sequences of the step that is taken apart
    context: int  # tokens of each
    steps: int
    rows: tuple[int, ...]


FULL = Scale((16, 32, 64, 128, 256, 512, 1024), 3, 16, 256, 16, (1, 2, 4, 8, 16, 32, 64))  # about a minute
QUICK = Scale((16, 64, 256), 1, 4, 64, 6, (1, 4, 16))


def run(
    stages: Iterable[str | int] | None = None,
    model: str = "smollm2-135m",
    dtype: str = "auto",
    kv_bytes: int = 512 << 20,
    kernel: str = "auto",
    json: str | Path | None = None,
    quick: bool = False,
    out: str | Path = "reports",
) -> dict[str, Any]:
    """Take steps apart; print and save what was found.

    Args:
        stages: names or numbers; None takes 1 and 2.
        model: see `common.model.loader.resolve`.
        dtype: to compute in.
        kv_bytes: KV memory of each stage.
        kernel: attention kernel of the paged stages.
        json: write all figures to this file as well.
        quick: fewer and shorter requests.
        out: folder for `step.html`, `step.md` and `step.json`.

    Returns:
        What the JSON holds: environment, and the figures of `by_length`, `parts` and `roofline`.

    Raises:
        SixstageError: a value or the model cannot be used, a file cannot be written.
    """
    names, console, scale = (
        pick_stages((1, 2) if stages is None else stages),
        new_console(),
        QUICK if quick else FULL,
    )
    loaded = load_model(model, dtype=dtype)
    config = EngineConfig(
        kv_bytes=kv_bytes,
        max_model_len=min(2048, loaded.config.max_position_embeddings),
        max_num_batched_tokens=8192,
        kernel=kernel,  # type: ignore[arg-type]  # checked by EngineConfig
    )

    def make(name: str) -> Engine:
        return find_stage(name)[1].resolve()(loaded, config)

    with progress(console) as bars:
        bar = bars.add_task("taking steps apart", total=None, note="")
        by_length = time_by_length(names, make, scale, lambda what: bars.update(bar, advance=1, note=what))
        parts = {}
        for label, name, count in step_cases(names, scale.batch):
            bars.update(bar, advance=1, note=label)
            parts[label] = take_apart(make(name), count, scale.context, scale.steps)
        bars.update(bar, advance=1, note="roofline")
        roof = measure(loaded.config, loaded.dtype, rows=scale.rows, rounds=5).to_json()
        roof["multiply_flop_per_second"] = multiply_rate(loaded.dtype)
        roof["roofs"] = roof_figures(roof)
    results = {
        "environment": environment(model=model, dtype=str(loaded.dtype).removeprefix("torch."), stage=names,
                                   kernel=kernel, kv_bytes=kv_bytes),
        "by_length": by_length,
        "parts": {"context": scale.context, "cases": parts},
        "roofline": roof,
    }  # fmt: skip
    publish(step_report(results), console, out, "step", json)
    return results


def time_by_length(
    names: Iterable[str], make: Callable[[str], Engine], scale: Scale, on_step: Callable[[str], None]
) -> dict[str, dict[str, float]]:
    """Stage -> tokens of text -> seconds of the next token, the fastest; stages and lengths in turn."""
    found: dict[str, dict[str, list[float]]] = {name: {str(n): [] for n in scale.lengths} for name in names}
    for _ in range(scale.rounds):
        for length in scale.lengths:
            for name, times in found.items():
                on_step(f"{name}, {length} tokens")
                times[str(length)] += _step_times(make(name), 1, length, 4)[1:]
    return {name: {n: min(times) for n, times in lengths.items()} for name, lengths in found.items()}


def step_cases(names: Iterable[str], batch: int) -> list[tuple[str, str, int]]:
    """(label, stage, sequences): each stage alone, and those that batch with a full batch."""
    cases = []
    for name in names:
        cases.append((f"{name}, 1 request", name, 1))
        if name != "stage1_naive":
            cases.append((f"{name}, {batch} requests", name, batch))
    return cases


def take_apart(engine: Engine, count: int, context: int, steps: int) -> dict[str, float]:
    """Seconds of each of PARTS in the fastest step, and the tokens that a step gives.

    Args:
        engine: fresh.
        count: sequences in the batch.
        context: tokens of each prompt.
        steps: steps that are timed; the first one, which computes the prompts, is not.
    """
    laps: list[dict[str, float]] = []
    with clocked(engine, OutputProcessor(None)) as clock:
        _step_times(engine, count, context, steps, lambda: laps.append(clock.lap()))
    fastest = min(laps[1:], key=lambda lap: sum(lap.values()))
    parts = {part: sum(fastest[piece] for piece in pieces) for part, pieces in PARTS.items()}
    return parts | {"total": sum(parts.values()), "tokens": count}


def multiply_rate(dtype: torch.dtype, rounds: int = 7) -> float:
    """Floating-point operations per second of a large matrix product, the median of some."""
    a = torch.randn(SQUARE, SQUARE).to(dtype)  # [SQUARE, SQUARE]
    times = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        torch.mm(a, a)
        times.append(time.perf_counter() - start)
    return 2 * SQUARE**3 / median(times[2:])


def _step_times(
    engine: Engine, count: int, context: int, steps: int, after_step: Callable[[], None] | None = None
) -> list[float]:
    """Seconds of each step while `count` equal requests are answered; the first one computes the prompts."""
    token = _middle_token(engine.model)
    params = SamplingParams(temperature=0.0, max_tokens=steps + 1, ignore_eos=True)
    requests = [Request(str(i), (token,) * context, params) for i in range(count)]
    times, before = [], time.perf_counter()
    for _ in drive(engine, requests):
        times.append(time.perf_counter() - before)
        if after_step is not None:
            after_step()
        before = time.perf_counter()
    return times


def _middle_token(model: Model) -> int:
    return model.config.vocab_size // 2
