"""A client that sends the requests of a trace at given times over HTTP and notes when their tokens come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from common.bench.metrics import percentiles
from common.bench.serve_stream import events
from common.bench.workloads import TraceRequest


@dataclass
class Outcome:
    """What became of one request; times in seconds after the start of the run.

    Attributes:
        arrived: when it was to be sent; a client that is late itself does not make the server look better.
        wanted: tokens of its answer.
        tokens: tokens that came; fewer than wanted if the client gave up.
        first, last: when the first and the last of them came; the time of giving up, for what never came.
    """

    arrived: float
    wanted: int
    tokens: int = 0
    first: float = float("inf")
    last: float = float("inf")

    @property
    def finished(self) -> bool:
        """Whether the whole answer has come."""
        return self.tokens == self.wanted

    @property
    def ttft_s(self) -> float:
        """Time to the first token, seconds."""
        return self.first - self.arrived

    @property
    def tpot_s(self) -> float:
        """Time per further token, seconds; 0 for an answer of one token."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else 0.0


@dataclass(frozen=True)
class Goal:
    """What a user counts as good, in seconds: about as fast as people read."""

    ttft_s: float = 2.0
    tpot_s: float = 0.2

    def met(self, outcome: Outcome) -> bool:
        """Whether the request was served well."""
        return outcome.finished and outcome.ttft_s <= self.ttft_s and outcome.tpot_s <= self.tpot_s


def serving_figures(outcomes: Seq[Outcome], goal: Goal) -> dict[str, Any]:
    """Figures of a run as plain numbers.

    * `goodput_rps`: requests per second that met the goal; `met` is their share.
    * `ttft_s`, `tpot_s`: p50, p95, p99, mean over the requests.
    * `latency_s_per_token`: the PagedAttention paper's normalised latency, arrival to end over the tokens of the
      answer.  A request that was given up counts with the time until then, which is less than its latency.
    """
    seconds = max(outcome.last for outcome in outcomes)
    begun = [outcome for outcome in outcomes if outcome.tokens]
    good = sum(goal.met(outcome) for outcome in outcomes)
    return {
        "requests": len(outcomes),
        "finished": sum(outcome.finished for outcome in outcomes),
        "seconds": seconds,
        "output_tok_s": sum(outcome.tokens for outcome in outcomes) / seconds,
        "goodput_rps": good / seconds,
        "met": good / len(outcomes),
        "ttft_s": percentiles([outcome.ttft_s for outcome in outcomes]),
        "tpot_s": percentiles([outcome.tpot_s for outcome in begun if outcome.wanted > 1]),
        "latency_s_per_token": fmean((one.last - one.arrived) / one.wanted for one in outcomes),
    }


def replay(
    base: str, trace: Seq[TraceRequest], arrivals: Seq[float], patience: float, salt: str
) -> list[Outcome]:
    """Send each request at its time, whatever has become of the others, and read its stream.

    Args:
        base: the server's URL, without /v1.
        trace: prompts and lengths of answers; the length is all that the server is told.
        arrivals: seconds after the start, one for each.
        patience: seconds after the last arrival at which unfinished requests are given up.
        salt: runs with different salts find nothing of each other in a prefix cache.

    Raises:
        SixstageError: the server refused a request.
    """
    return asyncio.run(_replay(base, trace, arrivals, patience, salt))


async def _replay(
    base: str, trace: Seq[TraceRequest], arrivals: Seq[float], patience: float, salt: str
) -> list[Outcome]:
    outcomes = [Outcome(at, item.output_len) for at, item in zip(arrivals, trace, strict=True)]
    start = time.perf_counter()
    todo = [
        asyncio.create_task(_send(base, body(item, salt), outcome, start))
        for item, outcome in zip(trace, outcomes, strict=True)
    ]
    done, given_up = await asyncio.wait(todo, timeout=arrivals[-1] + patience)
    for task in given_up:
        task.cancel()
    await asyncio.gather(*given_up, return_exceptions=True)
    now = time.perf_counter() - start
    for task in done:
        task.result()  # raises what it has raised
    for outcome in outcomes:
        if not outcome.finished:
            outcome.first, outcome.last = min(outcome.first, now), now
    return outcomes


def body(item: TraceRequest, salt: str) -> dict[str, Any]:
    """The request; its answer cannot end early."""
    return {
        "prompt": list(item.prompt_token_ids),
        "max_tokens": item.output_len,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": salt,
    }


async def _send(base: str, asked: dict[str, Any], outcome: Outcome, start: float) -> None:
    """Wait for the time, send, and note what comes."""
    await asyncio.sleep(outcome.arrived - (time.perf_counter() - start))
    async for event in events(base, "/v1/completions", asked):
        now = time.perf_counter() - start
        outcome.first, outcome.last = min(outcome.first, now), now
        if event["usage"] is not None:  # the last one; it says how many tokens the texts before it held
            outcome.tokens = event["usage"]["completion_tokens"]
        else:
            outcome.tokens += outcome.tokens < outcome.wanted - 1
