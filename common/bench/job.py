"""One measured run in a process of its own, so that no run inherits another's heap, caches or threads.

The child reads a `Job` as JSON from its standard input and writes JSON lines to its standard output:
progress, then a result or an error.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from typing import Any

import torch

from common.bench.arrivals import Arrival, arrival_times
from common.bench.environment import environment, peak_memory_bytes
from common.bench.harness import run_stage
from common.bench.metrics import summarise
from common.bench.replay import Replay
from common.bench.report_events import events
from common.bench.workloads import Bound, TraceRequest, make_trace, trace_hash
from common.config import EngineConfig, Reservation
from common.errors import SixstageError
from common.model.loader import load_model
from common.protocol import StepOutput

OnProgress = Callable[[int, int], None]
"""(tokens so far, tokens of the whole trace)."""


@dataclass(frozen=True)
class Job:
    """All that decides a run; two equal jobs do the same work.

    The fields are those of `make_trace`, `load_model`, `EngineConfig` and `arrival_times`.
    """

    stage: str
    model: str = "smollm2-135m"
    dtype: str = "auto"
    workload: str = "sharegpt"
    num_requests: int | None = None
    bound: Bound | None = None
    longest: int | None = None
    seed: int = 0
    kv_bytes: int = 256 << 20
    max_model_len: int = 2048
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    reservation: Reservation = "max_tokens"
    kernel: str = "auto"
    enable_prefix_caching: bool = True
    arrival: Arrival = "at_once"
    rate: float | None = None  # requests per second, see `arrival_times`

    def engine_config(self) -> EngineConfig:
        """The engine's part of the job.

        Raises:
            InvalidValue: a value is outside its range.
        """
        return EngineConfig(
            kv_bytes=self.kv_bytes,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            block_size=self.block_size,
            reservation=self.reservation,
            kernel=self.kernel,  # type: ignore[arg-type]  # checked by EngineConfig
            enable_prefix_caching=self.enable_prefix_caching,
        )

    def trace(self, vocab_size: int) -> list[TraceRequest]:
        """The requests.

        Raises:
            InvalidValue: a value is outside its range.
        """
        return make_trace(
            self.workload,
            self.num_requests,
            vocab_size=vocab_size,
            seed=self.seed,
            bound=self.bound,
            max_model_len=self.max_model_len,
            longest=self.longest,
        )

    def environment(self, dtype: torch.dtype, digest: str, stages: Seq[str] | None = None) -> dict[str, Any]:
        """Where and with what it is done: machine, software, and the job's own fields.

        Args:
            dtype: what `self.dtype` came to.
            digest: hash of the trace.
            stages: names, where the job stands for several.
        """
        found = {"dtype": str(dtype).removeprefix("torch."), "trace_hash": digest}
        return environment(**asdict(self) | found | ({} if stages is None else {"stage": stages}))


def run_here(job: Job, on_progress: OnProgress | None = None) -> dict[str, Any]:
    """Do a job in this process.

    Returns:
        `figures` (see `summarise`, plus the process's `peak_memory_bytes`), `events` (see
        `report_events.events`), `trace_hash`, `environment`.

    Raises:
        SixstageError: the job cannot be done; one line that says why.
    """
    model = load_model(job.model, dtype=job.dtype)
    trace = job.trace(model.config.vocab_size)
    replay, done = Replay(trace, model.config), 0

    def on_step(outputs: list[StepOutput]) -> None:
        nonlocal done
        done += sum(len(output.new_token_ids) for output in outputs)
        if on_progress is not None:
            on_progress(done, replay.tokens)

    run = run_stage(
        job.stage,
        model,
        job.engine_config(),
        replay.first,
        on_step=on_step,
        wrap=replay.script,
        arrivals=arrival_times(job.arrival, len(replay.first), job.rate, job.seed),
        follow=replay.follow,
    )
    digest = trace_hash(trace)
    return {
        "figures": summarise(run) | {"peak_memory_bytes": peak_memory_bytes()},
        "events": events(run),
        "trace_hash": digest,
        "environment": job.environment(model.dtype, digest),
    }


def run_fresh(job: Job, on_progress: OnProgress | None = None) -> dict[str, Any]:
    """Do a job in a fresh process; the same answer and the same errors as `run_here`."""
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "common.bench.job"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        with child:
            try:
                result = _listen(child, job, on_progress)
            except BaseException:
                child.kill()
                raise
        if result is None:
            errors.seek(0)
            last = errors.read().strip().rpartition("\n")[2] or "it said nothing"
            raise SixstageError(f"{job.stage}: the run ended with exit code {child.returncode}: {last}")
    return result


def _listen(child: subprocess.Popen[str], job: Job, on_progress: OnProgress | None) -> dict[str, Any] | None:
    """Send the job and read until there is a result; None if the child ends without one."""
    assert child.stdin is not None  # both are pipes
    assert child.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it is dead already: its exit code and last words will tell
        child.stdin.write(json.dumps(asdict(job)))
        child.stdin.close()
    for line in child.stdout:
        message = json.loads(line)
        if "error" in message:
            raise SixstageError(f"{job.stage}: {message['error']}")
        if "result" in message:
            result: dict[str, Any] = message["result"]
            return result
        if on_progress is not None:
            on_progress(*message["progress"])
    return None


def main() -> None:
    """Be the child."""
    job = Job(**json.loads(sys.stdin.read()))
    step = 0

    def on_progress(done: int, total: int) -> None:
        nonlocal step
        step += 1
        if step % 16 == 0 or done == total:
            print(json.dumps({"progress": [done, total]}), flush=True)

    try:
        print(json.dumps({"result": run_here(job, on_progress)}), flush=True)
    except SixstageError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
