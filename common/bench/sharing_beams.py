"""Beam search in two ways, over the real model: which is faster, and how many blocks beams share.

* **fork**: inside the engine; a beam goes on in its parent's blocks, which are copied on write.
* **resubmit**: above it; every step sends every beam anew, and the prefix cache finds what it had.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from importlib import import_module
from statistics import median
from typing import Any, Literal

from common.beam_params import BeamSearchParams
from common.bench.demo_prompts import PROMPTS
from common.bench.job import Job
from common.bench.sharing_counts import BlockMeter
from common.bench.sharing_speed import make_engine
from common.generate import drive
from common.model.loader import load_tokenizer
from common.protocol import Engine, Model, Request, StepOutput

Way = Literal["fork", "resubmit", "resubmit, cache off"]
WAYS: tuple[Way, ...] = ("fork", "resubmit")
UNCACHED: Way = "resubmit, cache off"
PAPER_BEAMS = {"short": {2: "37.6", 4: "53.1", 6: "55.2"}, "long": {2: "44.3", 6: "66.3"}}
"""Memory saved, in percent: the PagedAttention paper's Fig. 15 on Alpaca and (least, greatest) on ShareGPT."""

OnStep = Callable[[str], None]


@dataclass(frozen=True)
class BeamScale:
    """How much of the experiment is done."""

    cases: tuple[tuple[int, int, int], ...]  # of the comparison: width, questions in a prompt, block size
    answer: int
    runs: int
    saving_widths: tuple[int, ...]
    short: tuple[int, int]  # searches, answer tokens: one question each, as on Alpaca
    long: tuple[int, int]  # likewise: all questions at once, as long as ShareGPT's


def compare_ways(job: Job, model: Model, scale: BeamScale, on_step: OnStep) -> list[dict[str, Any]]:
    """Two searches at a time, both ways alternating; without a cache only the first case, once: it takes long.

    Returns:
        One row per case: `width`, `block_size`, `prompt_tokens`, `answer_tokens`, and `ways`: way -> medians
        of `tok_s` (tokens of the best answers per second), `tokens_computed`, `copies`, `cached_tokens`.
    """
    rows: list[dict[str, Any]] = []
    for width, count, block_size in scale.cases:
        case = replace(job, block_size=block_size, max_num_seqs=2 * width)
        prompts = questions(job.model, count, 2)
        requests = beam_requests(prompts, width, scale.answer)
        _search(case, model, "fork", beam_requests(prompts, width, 2))  # kernels are compiled per block size
        ways = WAYS if rows else (*WAYS, UNCACHED)
        seen: dict[Way, list[dict[str, float]]] = {way: [] for way in ways}
        for number in range(scale.runs):
            for way in (ways if number == 0 else WAYS)[:: -1 if number % 2 else 1]:
                on_step(f"beams of width {width}, {way}")
                seen[way].append(_search(case, model, way, requests))
        rows.append({
            "width": width,
            "block_size": block_size,
            "prompt_tokens": max(len(prompt) for prompt in prompts),
            "answer_tokens": scale.answer,
            "ways": {
                way: {name: median(run[name] for run in runs) for name in runs[0]}
                for way, runs in seen.items()
            },
        })  # fmt: skip
    return rows


def beam_savings(job: Job, model: Model, scale: BeamScale, on_step: OnStep) -> dict[str, Any]:
    """Blocks that the beams of searches over real text share; a salt keeps searches from sharing with each other.

    Returns:
        "short" and "long" -> `prompt_tokens` (mean), `answer_tokens`, and `by_width`: width -> share saved.
    """
    found: dict[str, Any] = {}
    for name, count, (searches, answer) in (("short", 1, scale.short), ("long", len(PROMPTS), scale.long)):
        prompts = questions(job.model, count, searches)
        by_width = {}
        for width in scale.saving_widths:
            on_step(f"blocks of {width} beams, {name}")
            engine = make_engine(replace(job, max_num_seqs=width * searches), model)
            meter = BlockMeter(engine.executor, engine)
            engine.executor = meter
            requests = beam_requests(prompts, width, answer)
            for _ in drive(engine, [replace(one, cache_salt=one.request_id) for one in requests]):
                pass
            by_width[str(width)] = meter.saved
        mean = sum(map(len, prompts)) / len(prompts)
        found[name] = {"prompt_tokens": mean, "answer_tokens": answer, "by_width": by_width}
    return found


def questions(model: str, count: int, searches: int) -> list[tuple[int, ...]]:
    """Token ids of so many chats, each asking `count` of the demo's questions, no two the same."""
    tokenizer = load_tokenizer(model)
    asked = [[PROMPTS[(i + j) % len(PROMPTS)] for j in range(count)] for i in range(searches)]
    return [tuple(tokenizer.apply_chat_template([{"role": "user", "content": "\n".join(questions)}]))
            for questions in asked]  # fmt: skip


def beam_requests(prompts: Seq[tuple[int, ...]], width: int, answer: int) -> list[Request]:
    """Searches whose beams all have `answer` tokens in the end."""
    params = BeamSearchParams(beam_width=width, max_tokens=answer, ignore_eos=True)
    return [
        Request(f"search {i}", prompt, params.sampling_params(), beam=params)
        for i, prompt in enumerate(prompts)
    ]


def _search(job: Job, model: Model, way: Way, requests: Seq[Request]) -> dict[str, float]:
    """Do the searches in one way with an engine of their own."""
    engine = make_engine(replace(job, enable_prefix_caching=way != UNCACHED), model)
    start = time.perf_counter()
    steps = drive(engine, requests) if way == "fork" else drive_resubmitted(job.stage, engine, requests)
    tokens = sum(len(out.new_token_ids) for outputs in steps for out in outputs)
    stats = engine.stats
    return {
        "tok_s": tokens / (time.perf_counter() - start),
        "tokens_computed": stats.tokens_computed,
        "copies": stats.cache.copies,
        "cached_tokens": stats.cache.hits,
    }


def drive_resubmitted(stage: str, engine: Engine, requests: Iterable[Request]) -> Iterator[list[StepOutput]]:
    """`drive` for searches that live above the engine, in the stage's `beam_resubmit`."""
    beams = import_module(f"{stage}.beam_resubmit").ResubmittedBeams(engine)  # by name: see `common.stages`
    todo = [part for request in requests for part in beams.start(request)]
    while todo or engine.has_unfinished():
        for part in todo:
            engine.add_request(part)
        outputs, todo = beams.take(engine.step())
        yield outputs
