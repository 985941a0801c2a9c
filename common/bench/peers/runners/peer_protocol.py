"""What every runner does around its engine: take a job, tell of progress and times.  Standard library only.

A runner is started by its path with the Python of the engine's own environment.  It reads one JSON object from its
standard input and writes JSON lines to its standard output:

    {"versions": {...}}                           the engine is loaded
    {"begin": 0}, {"tokens": 120}, {"run": {...}}   for each run of the job, the last of which counts
    {"error": "..."}                              it cannot be done
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

Request = dict[str, Any]
"""`prompt`: token ids; `output`: how many tokens to answer with, no more and no fewer."""

Say = Callable[[dict[str, Any]], None]
EVERY = 0.5  # seconds between two notes of progress


class Times:
    """Notes when the tokens of one run's requests come, in seconds after the run's start."""

    def __init__(self, requests: list[Request], say: Say) -> None:
        self.wanted = [request["output"] for request in requests]
        self.first = [0.0] * len(requests)
        self.last = [0.0] * len(requests)
        self.tokens = [0] * len(requests)
        self.say, self.said = say, 0.0
        self.start = time.perf_counter()

    def add(self, request: int, count: int = 1) -> None:
        """`count` tokens of the answer to `request` (its number) have just come."""
        if not count:
            return
        now = time.perf_counter() - self.start
        if not self.tokens[request]:
            self.first[request] = now
        self.tokens[request] += count
        self.last[request] = now
        if now - self.said > EVERY:
            self.said = now
            self.say({"tokens": sum(self.tokens)})

    def figures(self) -> dict[str, Any]:
        """Seconds of the whole run and, per request, when its first and last token came, and how many did."""
        rows = zip(self.first, self.last, self.tokens, strict=True)
        return {"seconds": max(self.last), "requests": [list(row) for row in rows]}


Serve = Callable[[list[Request], Times], None]
"""Answer these requests, all of which are there from the start."""


def main(load: Callable[[dict[str, Any]], Serve], packages: Iterable[str]) -> None:
    """Be a runner.

    Args:
        load: makes the engine ready for a job (see `common.bench.peers.process.PeerJob`).
        packages: whose versions are told.
    """
    say = _own_stdout()
    job = json.load(sys.stdin)
    try:
        serve = load(job)
        say({"versions": {name: _version(name) for name in packages}})
        for number, requests in enumerate(job["runs"]):
            say({"begin": number})
            times = Times(requests, say)
            serve(requests, times)
            say({"run": times.figures()})
    except Exception as error:
        text = " ".join(str(error).split()) or "no message"
        say({"error": f"{type(error).__name__}: {text}"[:500]})
        raise  # the whole of it, for the one who reads the log


def _own_stdout() -> Say:
    """Keep the standard output for the protocol; what libraries print there goes to the standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=out, flush=True)

    return say


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
