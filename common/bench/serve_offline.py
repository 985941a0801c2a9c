"""The same requests at the same times without a server: the engine alone, in a process of its own.

The child reads a `Job` as JSON from each line of its standard input and answers with a line of JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial

from common.bench.arrivals import arrival_times
from common.bench.harness import run_stage
from common.bench.job import Job
from common.bench.replay import Replay
from common.bench.serve_client import Outcome
from common.errors import SixstageError
from common.model.loader import load_model


@contextmanager
def offline_process() -> Iterator[Callable[[Job], list[Outcome]]]:
    """`serve_offline` in another process, so that neither heap nor threads are shared with the client."""
    command = [sys.executable, "-m", "common.bench.serve_offline"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield partial(_ask, child)
        finally:
            child.kill()


def _ask(child: subprocess.Popen[str], job: Job) -> list[Outcome]:
    assert child.stdin is not None  # both are pipes
    assert child.stdout is not None
    child.stdin.write(json.dumps(asdict(job)) + "\n")
    child.stdin.flush()
    answer = json.loads(child.stdout.readline() or '{"error": "the run without a server died"}')
    if "error" in answer:
        raise SixstageError(f"{job.stage}: {answer['error']}")
    return [Outcome(**outcome) for outcome in answer["outcomes"]]


def serve_offline(job: Job) -> list[Outcome]:
    """Do a job and tell what became of each request, in the order of the trace.

    Raises:
        SixstageError: the job cannot be done.
    """
    model = load_model(job.model, dtype=job.dtype)
    trace = job.trace(model.config.vocab_size)
    replay = Replay(trace, model.config)
    run = run_stage(
        job.stage,
        model,
        job.engine_config(),
        replay.first,
        wrap=replay.script,
        memory_every=0,
        arrivals=arrival_times(job.arrival, len(trace), job.rate, job.seed),
    )
    outcomes = []
    for number, item in enumerate(trace):
        times = run.token_times[str(number), 0]
        arrived = run.added[str(number)]
        outcomes.append(Outcome(arrived, item.output_len, len(times), times[0], times[-1]))
    return outcomes


def main() -> None:
    """Be the child."""
    for line in sys.stdin:
        try:
            answer: dict[str, object] = {
                "outcomes": [asdict(one) for one in serve_offline(Job(**json.loads(line)))]
            }
        except SixstageError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
