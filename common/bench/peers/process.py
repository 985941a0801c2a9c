"""One measured run of one engine: a runner in a process of its own, listened to and cut off in time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Timer
from typing import IO, Any

from common.bench.peers.environments import child_environment
from common.errors import SixstageError

LOAD_SECONDS = 600.0  # compiling counts as loading
OnProgress = Callable[[str, int], None]
"""(what it does, tokens so far)."""


@dataclass(frozen=True)
class PeerJob:
    """What a runner is told.

    Attributes:
        model: folder of the model, or what it was converted to.
        dtype: to compute in.
        cores: that it may use, one thread on each.
        kv_bytes: memory for keys and values.
        max_model_len: longest prompt + answer.
        max_num_seqs: most sequences in one batch.
        runs: lists of requests; all but the last are for warming up.
        options: the runner's own (see `Contender.options`).
    """

    model: str
    dtype: str
    cores: list[int]
    kv_bytes: int
    max_model_len: int
    max_num_seqs: int
    runs: list[list[dict[str, Any]]]
    options: dict[str, str | int] = field(default_factory=dict)

    def to_json(self) -> str:
        """As the runner reads it, the options beside the rest."""
        fields = asdict(self)
        return json.dumps({**fields.pop("options"), **fields, "threads": len(self.cores)})


class RunFailed(SixstageError):
    """An engine could not do its job; one line that says why."""


@dataclass(frozen=True)
class Ended:
    """A run that came to its end.

    Attributes:
        versions: of the engine's packages.
        seconds: from the requests' arrival to the last token.
        requests: per request the seconds of its first and last token, and how many tokens came.
    """

    versions: dict[str, str]
    seconds: float
    requests: list[tuple[float, float, int]]


@dataclass(frozen=True)
class CutOff:
    """A run (of warming up, perhaps) that took longer than allowed, and how far it was by then."""

    versions: dict[str, str]
    seconds: float
    tokens: int


def run_peer(
    python: Path, runner: Path, job: PeerJob, limit: float, on_progress: OnProgress, isolated: bool
) -> Ended | CutOff:
    """Do a job in a fresh process.

    Args:
        python: of the engine's environment.
        runner: the script.
        job: what to do.
        limit: seconds for each run of the job; loading has a limit of its own.
        on_progress: told now and then how far it is.
        isolated: see `child_environment`.

    Raises:
        RunFailed: it ended with an error, or some request got too few or too many tokens.
    """
    with tempfile.TemporaryFile("w+") as said:
        child = subprocess.Popen(
            [str(python), str(runner)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env=child_environment(isolated, len(job.cores)),
            start_new_session=True,  # so that it can be ended with all that it has started
        )
        listener = _Listener(child, limit, on_progress, len(job.runs))
        try:
            return listener.listen(job, said)
        finally:
            listener.end()


class _Listener:
    """Reads what a runner says, and ends it when it takes too long."""

    def __init__(
        self, child: subprocess.Popen[str], limit: float, on_progress: OnProgress, runs: int
    ) -> None:
        self.child, self.limit, self.on_progress, self.runs = child, limit, on_progress, runs
        self.versions: dict[str, str] = {}
        self.run, self.tokens, self.late = -1, 0, False
        self.timer = self._timer(LOAD_SECONDS)

    def listen(self, job: PeerJob, said: IO[str]) -> Ended | CutOff:
        """Send the job; return what became of its last run, or of the one that took too long."""
        assert self.child.stdin is not None  # both are pipes
        assert self.child.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead already: its last words will tell
            self.child.stdin.write(job.to_json())
            self.child.stdin.close()
        for line in self.child.stdout:
            ended = self._take(json.loads(line))
            if ended is not None:
                _check_counts(ended, job.runs[-1])
                return ended
        if self.late and self.run >= 0:
            return CutOff(self.versions, self.limit, self.tokens)
        if self.late:
            raise RunFailed(f"not ready after {LOAD_SECONDS:.0f} s")
        said.seek(0)
        last = said.read().strip().rpartition("\n")[2] or "it said nothing"
        raise RunFailed(f"it ended with exit code {self.child.wait()}: {last}")

    def _take(self, message: dict[str, Any]) -> Ended | None:
        """One line of the runner's."""
        if "error" in message:
            raise RunFailed(message["error"])
        if "versions" in message:
            self.versions = message["versions"]
        elif "begin" in message:
            self.run, self.tokens = message["begin"], 0
            self.timer.cancel()
            self.timer = self._timer(self.limit)
        elif "tokens" in message:
            self.tokens = message["tokens"]
        elif self.run == self.runs - 1:
            figures = message["run"]
            return Ended(self.versions, figures["seconds"], [tuple(row) for row in figures["requests"]])
        self.on_progress("warming up" if self.run < self.runs - 1 else "measuring", self.tokens)
        return None

    def _timer(self, seconds: float) -> Timer:
        """From now on it has so many seconds."""
        timer = Timer(seconds, self._too_late)
        timer.daemon = True
        timer.start()
        return timer

    def _too_late(self) -> None:
        self.late = True
        _kill(self.child)

    def end(self) -> None:
        """End whatever still runs."""
        self.timer.cancel()
        _kill(self.child)
        self.child.wait()
        if self.child.stdout is not None:
            self.child.stdout.close()


def _kill(child: subprocess.Popen[str]) -> None:
    """End a process and all that it has started."""
    if sys.platform == "win32":
        child.kill()
        return
    with contextlib.suppress(ProcessLookupError):  # all of them have ended
        os.killpg(child.pid, signal.SIGKILL)


def _check_counts(ended: Ended, requests: list[dict[str, Any]]) -> None:
    """Every answer must be as long as it was to be."""
    wanted = [request["output"] for request in requests]
    came = [tokens for _, _, tokens in ended.requests]
    if came != wanted:
        number = next((n for n, (a, b) in enumerate(zip(came, wanted, strict=False)) if a != b), len(came))
        got = came[number] if number < len(came) else 0
        raise RunFailed(f"request {number} brought {got} tokens instead of {wanted[number]}")
