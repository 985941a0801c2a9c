"""Engines of every stage that need no model: an executor that counts, a script of answer lengths."""

from collections.abc import Sequence as Seq

import torch

from common.bench.scripted import CountingExecutor, ScriptedLengths, ShapeOnly
from common.config import EngineConfig
from common.model.config import ModelConfig
from common.protocol import Engine, Request
from common.sampling_params import SamplingParams
from common.stages import find_stage

CONFIG = ModelConfig(
    architecture="Shape",
    vocab_size=64,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    rope_inv_freq=(1.0,) * 4,
    eos_token_ids=frozenset({2}),
)


def counting_engine(
    stage: str, lengths: Seq[tuple[int, int]], kv_tokens: int = 1024, max_tokens: int = 16, **options: object
) -> tuple[Engine, list[Request]]:
    """An engine and requests "0", "1", ... with (prompt, answer) lengths; clients ask for `max_tokens`."""
    model = ShapeOnly(CONFIG, torch.float32)
    per_token = CONFIG.kv_bytes_per_token(torch.float32)
    chosen: dict = {"max_model_len": 64, "max_num_seqs": 4, "block_size": 4, "kernel": "reference"} | options
    engine = find_stage(stage)[1].resolve()(model, EngineConfig(kv_bytes=kv_tokens * per_token, **chosen))
    script = {str(i): output for i, (_, output) in enumerate(lengths)}
    engine.executor = ScriptedLengths(CountingExecutor(), script, CONFIG)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return engine, [Request(str(i), (5,) * prompt, params) for i, (prompt, _) in enumerate(lengths)]
