"""Build an engine for a test and run requests through it."""

from __future__ import annotations

from collections.abc import Iterable

from common.config import EngineConfig
from common.generate import drive
from common.protocol import Engine, Model, Request, StepOutput
from common.sampling_params import SamplingParams
from common.stages import find_stage


def build(stage: str, model: Model, *, kv_tokens: int = 2048, **options: object) -> Engine:
    """An engine over `model` with KV memory for `kv_tokens` tokens."""
    per_token = model.config.kv_bytes_per_token(model.dtype)
    config: dict = {"max_model_len": 128, "max_num_batched_tokens": 1024, "block_size": 4}
    config |= {"kernel": "reference"} | options
    return find_stage(stage)[1].resolve()(model, EngineConfig(kv_bytes=kv_tokens * per_token, **config))


def ask(name: str, prompt: Iterable[int], **params: object) -> Request:
    """A greedy request unless `params` says otherwise."""
    chosen: dict = {"temperature": 0.0, "max_tokens": 8} | params
    return Request(name, tuple(prompt), SamplingParams(**chosen))


def run(engine: Engine, requests: Iterable[Request]) -> dict[str, list[StepOutput]]:
    """Run to the end; what was said about each request, in order."""
    said: dict[str, list[StepOutput]] = {}
    for outputs in drive(engine, requests):
        for output in outputs:
            said.setdefault(output.request_id, []).append(output)
    return said


def tokens(outputs: Iterable[StepOutput], index: int = 0) -> list[int]:
    """The answer's token ids."""
    return [token for output in outputs if output.index == index for token in output.new_token_ids]


def answers(engine: Engine, requests: Iterable[Request]) -> dict[str, list[int]]:
    """Token ids by request, for requests with one answer each."""
    return {name: tokens(outputs) for name, outputs in run(engine, requests).items()}
