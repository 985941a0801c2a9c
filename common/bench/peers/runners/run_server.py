"""Our server, spoken to over HTTP with token ids as prompts and a stream for each request."""

import math
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

from peer_protocol import Request, Serve, Times, main

from common.bench.job import Job
from common.bench.serve_client import replay
from common.bench.serve_process import server_arguments, server_process
from common.bench.workloads import TraceRequest

KEEP = ExitStack()  # the server lives as long as the runner


def load(job: dict[str, Any]) -> Serve:
    """Start the server and wait until it listens."""
    settings = Job(
        job["stage"],
        job["model"],
        job["dtype"],
        kv_bytes=job["kv_bytes"],
        max_model_len=job["max_model_len"],
        max_num_seqs=job["max_num_seqs"],
    )
    server = KEEP.enter_context(server_process(*server_arguments(settings)))

    def serve(requests: list[Request], times: Times) -> None:
        trace = [
            TraceRequest(tuple(request["prompt"]), request["output"], request["output"])
            for request in requests
        ]
        outcomes = replay(server.base, trace, [0.0] * len(trace), math.inf, salt=uuid4().hex)
        times.first = [outcome.first for outcome in outcomes]
        times.last = [outcome.last for outcome in outcomes]
        times.tokens = [outcome.tokens for outcome in outcomes]

    return serve


if __name__ == "__main__":
    with KEEP:
        main(load, ["sixstage", "torch", "transformers", "numba"])
