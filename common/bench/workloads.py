"""What the benchmarks serve: named lists of requests, the same for every stage and every run."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Literal

import numpy as np

from common.bench.conversations import USERS, Talks, agent_talks, chat_talks
from common.errors import InvalidValue
from common.sampling_params import SamplingParams

Bound = Literal["exact", "pow2", "context"]
"""What a client asks for as `max_tokens`, knowing or not knowing how long its answer will be:

* `exact`: the true length.  Nobody can know it; the paper's "Orca (Oracle)".
* `pow2`: the next power of two, so at most twice the true length; the paper's "Orca (Pow2)".
* `context`: nothing but the end of the context bounds it; the paper's "Orca (Max)".
"""


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        prompt_token_ids: random ids, drawn from the trace's seed.
        output_len: tokens of the answer.  The engine is not told: the run ends the answer there with an
            end-of-sequence token, as a model would (`common.bench.scripted`).
        max_tokens: what the client asked for, all that the engine knows; at least `output_len`.
        after: number of the request that must have ended before this one comes (a turn of a conversation).
        answer: the answer's tokens but the last, which is an end-of-sequence id, where a later prompt
            repeats them; the run then makes the model say just that.
    """

    prompt_token_ids: tuple[int, ...]
    output_len: int
    max_tokens: int
    after: int | None = None
    answer: tuple[int, ...] | None = None

    def params(self) -> SamplingParams:
        """Greedy; the end comes by script."""
        return SamplingParams(temperature=0.0, max_tokens=self.max_tokens)


Lengths = list[tuple[int, int]]
"""(prompt tokens, output tokens) per request."""


@dataclass(frozen=True)
class Workload:
    """A named source of lengths."""

    about: str
    lengths: Callable[[int, int], Lengths | Talks]  # (how many requests, seed)
    default_requests: int
    bound: Bound  # the `max_tokens` that its clients send


def make_trace(
    name: str,
    num_requests: int | None = None,
    *,
    vocab_size: int,
    seed: int = 0,
    bound: Bound | None = None,
    max_model_len: int = 2048,
    longest: int | None = None,
) -> list[TraceRequest]:
    """Build a workload's trace; the same arguments give the same trace, wherever and whenever.

    Args:
        name: a key of `WORKLOADS`.
        num_requests: None takes the workload's own number.  Each turn of a conversation is a request.
        vocab_size: ids are drawn from its middle, away from the special tokens at its ends.
        seed: of lengths and ids.
        bound: what clients know of their answer's length; None takes the workload's own.
        max_model_len: requests are cut to fit it (prompt first to leave room for one token); a conversation
            that has outgrown it ends.
        longest: cut what is new in a prompt, and the answer, to at most this many tokens each (for quick
            runs); the system prompt too.

    Raises:
        InvalidValue: unknown workload, or a number outside its range.
    """
    workload = WORKLOADS.get(name)
    if workload is None:
        raise InvalidValue("workload", name, ", ".join(WORKLOADS))
    count = workload.default_requests if num_requests is None else num_requests
    if count < 1:
        raise InvalidValue("num_requests", num_requests, "an integer of at least 1")
    maker = _TraceMaker(vocab_size, seed, bound or workload.bound, max_model_len, longest)
    found = workload.lengths(count, seed)
    return maker.talks(found)[:count] if isinstance(found, Talks) else maker.singles(found)


class _TraceMaker:
    """Draws ids and cuts lengths; arguments as of `make_trace`."""

    def __init__(
        self, vocab_size: int, seed: int, bound: Bound, max_model_len: int, longest: int | None
    ) -> None:
        self.prompt_rng, self.answer_rng = np.random.default_rng(seed), np.random.default_rng((seed, 1))
        margin = min(1000, vocab_size // 8)
        self.low, self.high = margin, vocab_size - margin
        self.bound, self.max_model_len = bound, max_model_len
        self.cap = max_model_len if longest is None else min(longest, max_model_len)

    def singles(self, lengths: Lengths) -> list[TraceRequest]:
        """Requests that have nothing to do with each other."""
        return [self._request(self._new(prompt), output) for prompt, output in lengths]

    def talks(self, talks: Talks) -> list[TraceRequest]:
        """Conversations, turn by turn: each prompt is all that was said before, and what is new."""
        trace: list[TraceRequest] = []
        last: list[int] = []  # number of each conversation's last request
        system = self._new(talks.system_len)
        for number, turns in enumerate(talks.conversations):
            after = last[number - USERS] if number >= USERS else None
            said = system
            for new, output in turns:
                said += self._new(new)
                request = self._request(said, output)
                answer = self._ids(self.answer_rng, request.output_len - 1)
                trace.append(replace(request, after=after, answer=answer))
                said += answer
                after = len(trace) - 1
                if len(said) >= self.max_model_len:
                    break
            last.append(len(trace) - 1)
        return trace

    def _new(self, count: int) -> tuple[int, ...]:
        return self._ids(self.prompt_rng, min(count, self.cap))

    def _request(self, prompt: tuple[int, ...], wanted_output: int) -> TraceRequest:
        prompt = prompt[: self.max_model_len - 1]
        room = self.max_model_len - len(prompt)
        output_len = min(wanted_output, self.cap, room)
        return TraceRequest(prompt, output_len, client_bound(self.bound, output_len, room))

    def _ids(self, rng: np.random.Generator, count: int) -> tuple[int, ...]:
        return tuple(rng.integers(self.low, self.high, count).tolist())


def client_bound(bound: Bound, output_len: int, room: int) -> int:
    """`max_tokens` of a client with an answer of `output_len` tokens and `room` tokens of context left."""
    if bound == "exact":
        return output_len
    if bound == "pow2":
        return min(1 << (output_len - 1).bit_length(), room)
    return room


def trace_hash(trace: list[TraceRequest]) -> str:
    """sha256 over prompts and lengths of answers: equal hashes mean that the same work was served.

    What clients sent as `max_tokens` is no work; it stands beside the hash, as `bound`.
    """
    rows = [
        [list(r.prompt_token_ids), r.output_len] + ([] if r.answer is None else [list(r.answer), r.after])
        for r in trace
    ]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def _sharegpt(count: int, seed: int) -> Lengths:
    """Real (prompt, reply) lengths in an order shuffled by the seed; again from the start when used up."""
    with files("common.bench.data").joinpath("sharegpt_lengths.csv").open() as file:
        rows = [(int(r["prompt_tokens"]), int(r["output_tokens"])) for r in csv.DictReader(file)]
    random.Random(seed).shuffle(rows)
    return [rows[i % len(rows)] for i in range(count)]


# Inverse CDFs of the PagedAttention paper's ShareGPT lengths (means 161.31, 337.99), linear between points.
_PROBABILITY = (0, .01, .02, .05, .1, .15, .2, .25, .3, .35, .4, .45, .5, .55, .6, .65, .7, .75, .8, .85, .9,
                .925, .95, .97, .98, .99, .995, .999, 1)  # fmt: skip
_PAPER_IN = (1, 2, 3, 7, 9, 11, 13, 15, 18, 21, 24, 29, 35, 44, 55, 71, 94, 133, 203, 324, 507, 655, 864,
             1088, 1230, 1464, 1639, 1873, 2028)  # fmt: skip
_PAPER_OUT = (1, 4, 10, 22, 45, 75, 101, 128, 157, 188, 216, 244, 271, 300, 330, 364, 405, 458, 525, 619, 754,
              799, 899, 1040, 1139, 1280, 1443, 1707, 2009)  # fmt: skip
_PAPER_RHO = 0.218  # Gaussian copula between the two lengths


def _sharegpt_paper(count: int, seed: int) -> Lengths:
    """Lengths as in the paper's own sample; answers are cut at 2048 tokens in all, not drawn again."""
    rng = np.random.default_rng(seed)
    first, second = rng.standard_normal((2, count))
    second = _PAPER_RHO * first + math.sqrt(1 - _PAPER_RHO**2) * second
    uniform = [[0.5 * (1 + math.erf(z / math.sqrt(2))) for z in row] for row in (first, second)]
    prompts = np.interp(uniform[0], _PROBABILITY, _PAPER_IN).round().astype(int)
    outputs = np.interp(uniform[1], _PROBABILITY, _PAPER_OUT).round().astype(int)
    return [(int(p), int(min(o, 2048 - p))) for p, o in zip(prompts, outputs, strict=True)]


def _uniform(count: int, seed: int) -> Lengths:
    """nano-vllm's benchmark: both lengths uniform in 100..1024 (its order of draws, so its own lengths)."""
    rng = random.Random(seed)
    prompts = []
    for _ in range(count):
        prompts.append(rng.randint(100, 1024))
        for _ in range(prompts[-1]):
            rng.randint(0, 10000)  # its prompt ids come from the same generator
    return [(prompt, rng.randint(100, 1024)) for prompt in prompts]


def _alpaca(count: int, seed: int) -> Lengths:
    """Instructions: the PagedAttention paper's means, 19.31 in and 58.45 out, in shapes that are ours.

    Prompts gather around their mean (log-normal, sigma 0.5), answers spread (exponential).
    """
    rng = np.random.default_rng(seed)
    prompts = rng.lognormal(math.log(19.31) - 0.125, 0.5, count).round().astype(int)
    outputs = np.ceil(rng.exponential(58.45, count)).astype(int)
    return [(max(1, int(p)), int(min(o, 1024))) for p, o in zip(prompts, outputs, strict=True)]


WORKLOADS: dict[str, Workload] = {
    "sharegpt": Workload("2,000 real chat turns: short questions, long answers, wide spread",
                         _sharegpt, 32, "pow2"),
    "sharegpt-paper": Workload("the PagedAttention paper's ShareGPT lengths, from their distribution",
                               _sharegpt_paper, 32, "pow2"),
    "uniform": Workload("nano-vllm's benchmark: lengths uniform in 100..1024, known in advance",
                        _uniform, 256, "exact"),
    "alpaca": Workload("instructions: the PagedAttention paper's mean lengths, 19 in and 58 out",
                       _alpaca, 64, "pow2"),
    "agent": Workload("agents in tool turns, all with one system prompt of 1,000 tokens",
                      agent_talks, 64, "pow2"),
    "chat": Workload("real conversations of many turns, each on its own subject",
                     chat_talks, 64, "pow2"),
}  # fmt: skip
