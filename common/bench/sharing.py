"""`sixstage bench sharing`: what holding equal blocks once is worth, and what it costs.

Stage 4 against stage 5, which differ in nothing but sharing:

* **Agents**, with the real model: one system prompt of 1,000 tokens, many users and turns.
* **The first token** of a request whose beginning somebody else has sent before.
* **Conversations**, counted: real turns, and how much of a prompt is found in memories of several sizes.
* **Parallel samples and beams**, counted: blocks saved, beside the PagedAttention paper's Fig. 15.
* **Beam search in two ways**: fork with copy-on-write, and resubmission over the prefix cache.
* **Random prompts**, of which nothing is ever found: what the search for it costs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from common.bench.beam_picture import beam_picture, record_beams
from common.bench.harness import new_console, pick_stages, progress
from common.bench.job import Job, run_fresh, run_here
from common.bench.report import publish
from common.bench.run_stage import collect, run_all
from common.bench.sharing_beams import BeamScale, beam_savings, compare_ways
from common.bench.sharing_counts import OnStep, chat_hits, sample_savings
from common.bench.sharing_pictures import copy_picture, tree_picture
from common.bench.sharing_report import sharing_report
from common.bench.sharing_speed import SYSTEM, first_tokens, hash_cost, prefix_reading
from common.bench.workloads import trace_hash
from common.errors import InvalidValue
from common.model.loader import load_model, load_tokenizer, read_config, resolve, resolve_dtype
from common.protocol import Model

UNCACHED = "stage 5, cache off"
SAMPLES = (2, 4, 6)  # answers per request, as in the paper's Fig. 15


@dataclass(frozen=True)
class Scale:
    """How much of the experiment is done."""

    turns: int  # of all agents together, four each
    longest: int | None  # system prompt, new tokens and answers are cut to this
    chat_turns: int
    budgets: tuple[int, ...]  # KV memory of the conversations, tokens
    sampled: int  # requests of each workload of parallel samples
    prefixes: tuple[int, ...]  # tokens of a prefix that sixteen decodes share
    random: int  # prompts that have nothing in common
    beams: BeamScale
    runs: int
    fresh: bool  # each run of the agents in a process of its own


FULL = Scale(  # about ten minutes
    turns=40, longest=None, chat_turns=800, budgets=(4096, 8192, 16_384, 24_576, 32_768, 1 << 20),
    sampled=400, prefixes=(1000, 4000), random=12, runs=3, fresh=True,
    beams=BeamScale(
        cases=(*((width, count, 16) for width in (2, 4, 8) for count in (1, 16)), (4, 1, 4), (4, 1, 1)),
        answer=32, runs=3, saving_widths=(2, 4, 6), short=(8, 58), long=(1, 338),
    ),
)  # fmt: skip
QUICK = Scale(
    turns=8, longest=None, chat_turns=60, budgets=(4096, 1 << 20), sampled=20, prefixes=(200,), random=4,
    runs=1, fresh=False,
    beams=BeamScale(cases=((2, 1, 16),), answer=6, runs=1, saving_widths=(2, 4), short=(2, 16), long=(1, 16)),
)  # fmt: skip


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
    """Compare stages that share with those that do not; print and save the comparison.

    Args:
        stages: names or numbers; None takes 4 and 5.
        model: see `common.model.loader.resolve`.
        dtype: to compute in.
        kv_bytes: KV memory of each stage.
        max_num_seqs: places in a batch.
        kernel: attention kernel of the paged stages.
        json: write all figures to this file as well.
        quick: fewer and shorter requests.
        out: folder for `sharing.html`, `sharing.md` and `sharing.json`.

    Returns:
        What the JSON holds: environment, and the figures of `agents`, `first_token`, `prefix_reading`, `chat`,
        `samples`, `beam_blocks`, `beam_ways`, `hashing` and `beam_tree`.

    Raises:
        SixstageError: a value or the model cannot be used, a run failed, a file cannot be written.
    """
    names, console = pick_stages((4, 5) if stages is None else stages), new_console()
    if names[-1] < "stage5":
        raise InvalidValue("stages", names, "at least one that shares prefixes (stage 5 on)")
    scale = QUICK if quick else FULL
    config, compute = read_config(resolve(model)), resolve_dtype(dtype, torch.device("cpu"))
    base = Job(names[-1], model, dtype, "agent", num_requests=scale.turns, longest=scale.longest,
               kv_bytes=kv_bytes, max_num_seqs=max_num_seqs, kernel=kernel)  # fmt: skip
    results: dict[str, Any] = {
        "environment": base.environment(compute, trace_hash(base.trace(config.vocab_size)), names),
        "agents": _agents(base, names, scale, console),
    }
    loaded = load_model(model, dtype=dtype)
    with progress(console) as bars:
        bar = bars.add_task("sharing", total=None, note="")
        results |= _alone(base, names, scale, loaded, lambda what: bars.update(bar, advance=1, note=what))
    results["beam_tree"] = record_beams(names[-1], loaded, load_tokenizer(model))
    tree, copy = (draw(names[-1], config, compute) for draw in (tree_picture, copy_picture))
    report = sharing_report(results, tree, copy, beam_picture(names[-1], results["beam_tree"]))
    publish(report, console, out, "sharing", json)
    return results


def agent_systems(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Label -> the job's fields: every stage, and the last one with its cache switched off."""
    names = list(names)
    found: dict[str, dict[str, Any]] = {name: {"stage": name} for name in names}
    return found | {UNCACHED: {"stage": names[-1], "enable_prefix_caching": False}}


def _agents(base: Job, names: list[str], scale: Scale, console: Console) -> dict[str, Any]:
    """The stages on the same agents, each run in a fresh process."""
    jobs = {label: replace(base, **what) for label, what in agent_systems(names).items()}
    if len(names) > 1:  # a stage without a cache says the same, and takes as long
        del jobs[UNCACHED]
    return collect(run_all(jobs, scale.runs, console, run_fresh if scale.fresh else run_here))


def _alone(base: Job, names: list[str], scale: Scale, model: Model, on_step: OnStep) -> dict[str, Any]:
    """All experiments that need no process of their own."""
    shape = (model.config, model.dtype)
    plain = replace(base, longest=None, num_requests=None)
    systems = agent_systems(names[-1:])
    return {
        "first_token": first_tokens(plain, systems, model, scale.runs, on_step, min(SYSTEM, scale.longest or SYSTEM)),
        "prefix_reading": prefix_reading(plain, scale.prefixes, model, on_step),
        "chat": chat_hits(replace(plain, num_requests=scale.chat_turns), scale.budgets, *shape, on_step),
        "samples": sample_savings(replace(plain, num_requests=scale.sampled), ("alpaca", "sharegpt-paper"),
                                  SAMPLES, *shape, on_step),
        "beam_blocks": beam_savings(plain, model, scale.beams, on_step),
        "beam_ways": compare_ways(plain, model, scale.beams, on_step),
        "hashing": hash_cost(replace(base, workload="sharegpt", num_requests=scale.random, longest=256), model,
                             scale.runs, on_step),
    }  # fmt: skip
