"""`sixstage bench profile`: where the time of a workload goes, part by part, by a clock around the parts.

The workloads are those of `sixstage bench peers`.  Steps of two kinds are told apart: those that compute (some of)
a prompt, where arithmetic takes the time, and those in which every sequence gets one token.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from common.bench.environment import environment, peak_memory_bytes
from common.bench.harness import new_console, pick_stages, progress
from common.bench.peers.workloads import HIGH_ID, make_requests, pick_workloads
from common.bench.profile_clock import FORWARD, PARTS, clocked
from common.bench.profile_report import profile_report
from common.bench.report import publish
from common.config import EngineConfig
from common.generate import drive
from common.model.loader import load_model, load_tokenizer
from common.output import OutputProcessor
from common.protocol import Engine, Request
from common.sampling_params import SamplingParams
from common.stages import find_stage
from common.tokenizer import Tokenizer

NEWEST = "stage5_prefix_sharing"  # stage 6 runs the same engine


@dataclass(frozen=True)
class Step:
    """One step: seconds of each part, sequences in it, tokens computed."""

    seconds: dict[str, float]
    num_seqs: int
    num_tokens: int


def run(  # noqa: PLR0913, PLR0917
    stages: Iterable[str | int] | None = None,
    model: str = "smollm2-135m",
    dtype: str = "auto",
    kv_bytes: int = 1 << 30,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 2048,
    kernel: str = "auto",
    workloads: Iterable[str] | None = None,
    json: str | Path | None = None,
    quick: bool = False,
    out: str | Path = "reports",
) -> dict[str, Any]:
    """Profile workloads on a stage; print and save what was found.

    Args:
        stages: names or numbers; None takes stage 5.
        model: see `common.model.loader.resolve`.
        dtype: to compute in.
        kv_bytes: KV memory.
        max_num_seqs: most sequences in one batch.
        max_num_batched_tokens: most tokens in one forward.
        kernel: attention kernel of the paged stages.
        workloads: of `common.bench.peers.workloads`; None takes W1, W3, W4 and W5.
        json: write all figures to this file as well.
        quick: a few short requests.
        out: folder for `profile.html`, `profile.md` and `profile.json`.

    Returns:
        What the JSON holds: environment, and for each case (stage and workload) its figures, see `summarise`.

    Raises:
        SixstageError: a value or the model cannot be used, a file cannot be written.
    """
    names = pick_stages((NEWEST,) if stages is None else stages)
    jobs = pick_workloads(("W1", "W3", "W4", "W5") if workloads is None else workloads)
    console = new_console()
    loaded, tokenizer = load_model(model, dtype=dtype), load_tokenizer(model)
    high = min(HIGH_ID, loaded.config.vocab_size - 1)
    work = {job: make_requests(job, 0, quick, high) for job in jobs}
    config = EngineConfig(
        kv_bytes=kv_bytes,
        max_model_len=max(len(request["prompt"]) + request["output"] for request in chain(*work.values())),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kernel=kernel,  # type: ignore[arg-type]  # checked by EngineConfig
    )
    cases: dict[str, Any] = {}
    with progress(console) as bars:
        bar = bars.add_task("profiling", total=len(names) * len(jobs), note="")
        for name in names:
            make = find_stage(name)[1].resolve()
            warm = make_requests("W4", 1, True, high)
            profile(make(loaded, config), tokenizer, warm)  # what happens once in a process is not timed
            for job, requests in work.items():
                bars.update(bar, note=f"{name}, {job}")
                cases[f"{name}, {job}"] = summarise(profile(make(loaded, config), tokenizer, requests))
                bars.advance(bar)
    results = {
        "environment": environment(
            model=model, dtype=str(loaded.dtype).removeprefix("torch."), stage=names, kernel=kernel,
            kv_bytes=kv_bytes, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
        ),
        "peak_memory_bytes": peak_memory_bytes(),
        "cases": cases,
    }  # fmt: skip
    publish(profile_report(results), console, out, "profile", json)
    return results


def profile(engine: Engine, tokenizer: Tokenizer, requests: Seq[dict[str, Any]]) -> list[Step]:
    """Serve the requests, all there from the start, with a clock around the parts: every step that computed."""
    processor = OutputProcessor(tokenizer)
    asked = []
    for number, request in enumerate(requests):
        params = SamplingParams(temperature=0.0, max_tokens=request["output"], ignore_eos=True)
        asked.append(Request(str(number), tuple(request["prompt"]), params))
        processor.add(asked[-1], stream=False)
    steps = []
    with clocked(engine, processor) as clock:
        for outputs in drive(engine, asked):
            processor.process(outputs)
            computed = [num_new for _, num_new in engine.last_batch]
            steps.append(Step(clock.lap(), len(computed), sum(computed)))
    return steps


def summarise(steps: Seq[Step]) -> dict[str, Any]:
    """What a profile comes to.

    Returns:
        `seconds`: of each part over all steps.  `prompt` and `decode`: of the steps of that kind (None if there are
        none) `steps`, `tokens`, `seconds` in all, and `median_s` of each part.  For decode steps also `num_seqs`,
        the median, and `outside_forward`, the share of a step that is not the model's forward.
    """
    kinds = {
        "prompt": [step for step in steps if step.num_tokens > step.num_seqs],
        "decode": [step for step in steps if step.num_tokens <= step.num_seqs],
    }
    found: dict[str, Any] = {"seconds": {part: sum(step.seconds[part] for step in steps) for part in PARTS}}
    for kind, own in kinds.items():
        found[kind] = _of_kind(own) if own else None
    if found["decode"]:
        parts = found["decode"]["median_s"]
        outside = 1 - sum(parts[part] for part in FORWARD) / sum(parts.values())
        found["decode"] |= {
            "num_seqs": median(step.num_seqs for step in kinds["decode"]),
            "outside_forward": outside,
        }
    return found


def _of_kind(steps: Seq[Step]) -> dict[str, Any]:
    return {
        "steps": len(steps),
        "tokens": sum(step.num_tokens for step in steps),
        "seconds": sum(sum(step.seconds.values()) for step in steps),
        "median_s": {part: median(step.seconds[part] for step in steps) for part in PARTS},
    }
