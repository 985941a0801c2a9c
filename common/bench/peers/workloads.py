"""What the engines are measured on: five workloads, the same token ids for everybody."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np

from common.errors import InvalidValue

LOW_ID, HIGH_ID = 1000, 40000  # ids are drawn from here, both included: plain text, no special tokens


@dataclass(frozen=True)
class Shape:
    """Lengths of one request: its own prompt tokens after the `shared` ones, and its answer."""

    own: int
    output: int
    shared: int = 0


@dataclass(frozen=True)
class Headline:
    """The figure by which a workload is judged."""

    figure: str  # of `common.bench.peers.figures.run_figures`
    unit: str
    more_is_better: bool


SPEED = Headline("output_tok_s", "tok/s", True)
TOKEN_TIME = Headline("token_ms", "ms/token", False)
FIRST_TOKEN = Headline("ttft_s", "s to first token", False)


@dataclass(frozen=True)
class Workload:
    """Requests that are all there from the start, each with a fixed number of tokens to answer."""

    about: str
    headline: Headline
    shapes: Callable[[], list[Shape]]


def _sharegpt() -> list[Shape]:
    with files("common.bench.data").joinpath("sharegpt_lengths.csv").open() as file:
        rows = [Shape(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)]
    return rows[:64]


WORKLOADS: dict[str, Workload] = {
    "W1": Workload("64 real chat turns: 7,703 tokens in, 19,334 out", SPEED, _sharegpt),
    "W2": Workload("32 requests that share 1,024 tokens: 32 of their own, 64 out", SPEED,
                   lambda: [Shape(32, 64, shared=1024)] * 32),
    "W3": Workload("one user: 128 in, 128 out", TOKEN_TIME, lambda: [Shape(128, 128)]),
    "W4": Workload("32 users: 128 in, 128 out each", SPEED, lambda: [Shape(128, 128)] * 32),
    "W5": Workload("one prompt of 4,096 tokens, 16 out", FIRST_TOKEN, lambda: [Shape(4096, 16)]),
}  # fmt: skip

QUICK_REQUESTS, QUICK_PROMPT, QUICK_OUTPUT = 3, 64, 8


def pick_workloads(names: Iterable[str] | None) -> list[str]:
    """Names in the registry's order; None is all of them.

    Raises:
        InvalidValue: there is no such workload, or none was named.
    """
    if names is None:
        return list(WORKLOADS)
    wanted = set(names)
    if not wanted or not wanted <= WORKLOADS.keys():
        raise InvalidValue("workloads", sorted(wanted), "some of " + ", ".join(WORKLOADS))
    return [name for name in WORKLOADS if name in wanted]


def make_requests(name: str, seed: int, quick: bool = False, high: int = HIGH_ID) -> list[dict[str, Any]]:
    """A workload's requests as a runner takes them: `prompt` (token ids) and `output` (a count).

    Args:
        name: a key of `WORKLOADS`.
        seed: of the ids; lengths do not depend on it.
        quick: only the first few requests, and those cut short.
        high: the highest id, for a vocabulary smaller than the default model's.
    """
    shapes = WORKLOADS[name].shapes()
    if quick:
        shapes = [_cut(shape) for shape in shapes[:QUICK_REQUESTS]]
    rng = np.random.default_rng(seed)
    low = min(LOW_ID, high // 2)
    shared = rng.integers(low, high + 1, max(shape.shared for shape in shapes)).tolist()
    return [
        {
            "prompt": shared[: shape.shared] + rng.integers(low, high + 1, shape.own).tolist(),
            "output": shape.output,
        }
        for shape in shapes
    ]


def count_tokens(requests: Seq[dict[str, Any]]) -> tuple[int, int]:
    """(prompt tokens, answer tokens) of all of them."""
    return sum(len(one["prompt"]) for one in requests), sum(one["output"] for one in requests)


def _cut(shape: Shape) -> Shape:
    return Shape(
        min(shape.own, QUICK_PROMPT), min(shape.output, QUICK_OUTPUT), min(shape.shared, QUICK_PROMPT)
    )
