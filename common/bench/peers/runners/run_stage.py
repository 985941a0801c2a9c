"""One of our stages, its engine alone."""

from itertools import count
from typing import Any

import torch
from peer_protocol import Request, Serve, Times, main

from common import protocol
from common.config import EngineConfig
from common.generate import drive
from common.model.loader import load_model
from common.sampling_params import SamplingParams
from common.stages import find_stage


def load(job: dict[str, Any]) -> Serve:
    """One engine for all runs, as the peers have it."""
    torch.set_num_threads(job["threads"])
    config = EngineConfig(
        kv_bytes=job["kv_bytes"], max_model_len=job["max_model_len"], max_num_seqs=job["max_num_seqs"]
    )
    engine = find_stage(job["stage"])[1].resolve()(load_model(job["model"], dtype=job["dtype"]), config)
    names = map(str, count())

    def serve(requests: list[Request], times: Times) -> None:
        numbers = {next(names): number for number in range(len(requests))}
        asked = [
            protocol.Request(
                name,
                tuple(request["prompt"]),
                SamplingParams(temperature=0.0, max_tokens=request["output"], ignore_eos=True),
            )
            for name, request in zip(numbers, requests, strict=True)
        ]
        for outputs in drive(engine, asked):
            for output in outputs:
                times.add(numbers[output.request_id], len(output.new_token_ids))

    return serve


if __name__ == "__main__":
    main(load, ["sixstage", "torch", "transformers", "numba"])
