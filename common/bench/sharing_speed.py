"""What sharing does to time: a warm request's first token, a prefix read once for all, the cost of hashing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from common.bench.job import Job
from common.bench.replay import Replay
from common.bench.workloads import make_trace
from common.generate import drive
from common.protocol import Engine, Model, Request
from common.sampling_params import SamplingParams
from common.stages import find_stage

SYSTEM, USER = 1000, 32  # tokens that all prompts have in common, and those that differ
USERS, DECODES = 16, 24  # who share a prefix, and steps of each rule that are timed
RULES = {"own choice": None, "never": math.inf, "always": 1.0}
"""Rule -> reads of a block that must be saved for a prefix to be read once for all (None: as the stage has it)."""
PARTS = ("match", "publish")  # of stage 5's tables: all that the prefix cache adds to a request without a hit

OnStep = Callable[[str], None]


def first_tokens(job: Job, systems: Mapping[str, Mapping[str, Any]], model: Model, runs: int, on_step: OnStep,
                 system_len: int = SYSTEM) -> dict[str, Any]:  # fmt: skip
    """Time to first token of two requests that share a system prompt, one after the other, alone.

    Returns:
        Label -> `cold_s`, `warm_s`: medians of the first and of the second; `warm_share`: their ratio.
    """
    length = system_len + USER
    trace = make_trace("uniform", 2 + 2 * runs, vocab_size=model.config.vocab_size, max_model_len=2 * length)
    ids = [token for item in trace for token in item.prompt_token_ids]
    system, rest = tuple(ids[:system_len]), ids[system_len:]
    users = [tuple(rest[USER * i : USER * (i + 1)]) for i in range(2)]
    seen: dict[str, list[tuple[float, float]]] = {label: [] for label in systems}
    for number in range(runs + 1):  # the first round warms the process up
        for label, what in list(systems.items())[:: 1 if number % 2 else -1]:
            on_step(f"first token, {label}")
            engine = make_engine(replace(job, max_model_len=2 * length, **what), model)
            times = (
                _time_first_token(engine, system + users[0]),
                _time_first_token(engine, system + users[1]),
            )
            if number:
                seen[label].append(times)
    return {
        label: {
            "cold_s": median(cold for cold, _ in times),
            "warm_s": median(warm for _, warm in times),
            "warm_share": median(warm for _, warm in times) / median(cold for cold, _ in times),
        }
        for label, times in seen.items()
    }


def prefix_reading(
    job: Job, system_lens: Iterable[int], model: Model, on_step: OnStep
) -> list[dict[str, Any]]:
    """Seconds per decode step of sixteen sequences with a common prefix; the rule changes from step to step.

    Returns:
        One row per length: `prefix_tokens`, `chosen` (whether the stage reads that prefix together by its own
        rule), and `step_s`: rule -> median.
    """
    rows = []
    for length in system_lens:
        on_step(f"reading {length} shared tokens")
        context = length + USER + DECODES * len(RULES) + 8
        kv_bytes = (context + USERS * (context - length + 32)) * model.config.kv_bytes_per_token(model.dtype)
        engine = make_engine(
            replace(job, max_model_len=context, kv_bytes=kv_bytes, max_num_seqs=USERS), model
        )
        _let_in(engine, length)
        kv: Any = engine.kv  # of a stage that has the rule
        own = kv.sharing_rule
        seen: dict[str, list[float]] = {rule: [] for rule in RULES}
        for _ in range(DECODES):
            for rule, least in RULES.items():
                kv.sharing_rule = own if least is None else replace(own, least_saved=least)
                start = time.perf_counter()
                engine.step()
                seen[rule].append(time.perf_counter() - start)
        rows.append({
            "prefix_tokens": length,
            "chosen": own.least_saved <= (USERS - 1) * (length // job.block_size),
            "step_s": {rule: median(times) for rule, times in seen.items()},
        })  # fmt: skip
    return rows


def _let_in(engine: Engine, system_len: int) -> None:
    """Step until sixteen users with one system prompt are all being answered; the first comes before the others."""
    token = engine.model.config.vocab_size // 2
    params = SamplingParams(temperature=0.0, max_tokens=DECODES * len(RULES) + 8, ignore_eos=True)
    prompts = [(token,) * system_len + (token + 1 + i,) * USER for i in range(USERS)]
    for i, prompt in enumerate(prompts):
        engine.add_request(Request(f"user {i}", prompt, params))
        while not i and not engine.sequences()[0].num_output_tokens:
            engine.step()
    while any(not seq.num_output_tokens for seq in engine.sequences()):
        engine.step()


def hash_cost(job: Job, model: Model, runs: int, on_step: OnStep) -> dict[str, float]:
    """Serve prompts that have nothing in common, and time the parts of the cache that names blocks.

    Returns:
        `hash_s`, `run_s`, `share` (the one over the other), `hits`, `steps`; of the run whose share is the
        median.
    """
    found = []
    for number in range(runs):
        on_step(f"hashing, run {number + 1}")
        replay = Replay(job.trace(model.config.vocab_size), model.config)
        engine = make_engine(job, model)
        engine.executor = replay.script(engine.executor)
        watches = [Stopwatch(getattr(engine.kv.blocks, part)) for part in PARTS]  # type: ignore[attr-defined]
        for part, watch in zip(PARTS, watches, strict=True):
            setattr(engine.kv.blocks, part, watch)  # type: ignore[attr-defined]  # of a cache that shares
        start = time.perf_counter()
        for _ in drive(engine, replay.first):
            pass
        seconds = time.perf_counter() - start
        hashing = sum(watch.seconds for watch in watches)
        found.append({
            "share": hashing / seconds,
            "hash_s": hashing,
            "run_s": seconds,
            "hits": engine.stats.cache.hits,
            "steps": engine.stats.forwards,
        })  # fmt: skip
    return sorted(found, key=lambda figures: figures["share"])[len(found) // 2]


@dataclass
class Stopwatch:
    """A function that adds up how long its calls take."""

    inner: Callable[..., Any]
    seconds: float = 0.0

    def __call__(self, *arguments: Any) -> Any:
        """Call and time it."""
        start = time.perf_counter()
        result = self.inner(*arguments)
        self.seconds += time.perf_counter() - start
        return result


def make_engine(job: Job, model: Model) -> Engine:
    """The job's engine over a model that is loaded already."""
    return find_stage(job.stage)[1].resolve()(model, job.engine_config())


def _time_first_token(engine: Engine, prompt: tuple[int, ...]) -> float:
    """Seconds from adding the request to its only token."""
    start = time.perf_counter()
    params = SamplingParams(temperature=0.0, max_tokens=1)
    for _ in drive(engine, [Request("one", prompt, params)]):
        pass
    return time.perf_counter() - start
