"""A paged engine stopped in the middle, so that its block tables can be looked at."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import torch

from common.bench.report import Picture
from common.bench.scripted import CountingExecutor, ShapeOnly
from common.config import EngineConfig
from common.course.pictures import block_table
from common.generate import drive
from common.model.config import ModelConfig
from common.protocol import Request
from common.sampling_params import SamplingParams
from common.stages import find_stage

BLOCK_SIZE, NUM_BLOCKS, FORWARDS = 4, 24, 12
REQUESTS = {"A": (6, 4), "B": (9, 20), "C": (3, 20), "D": (7, 8), "E": (5, 20)}
"""Name -> (prompt tokens, answer tokens).  A and D end before we look; B, C and E grow into their blocks."""


@dataclass(frozen=True)
class Tables:
    """Block tables at one moment."""

    tables: dict[str, list[int]]
    lengths: dict[str, int]  # tokens stored


def stop_in_the_middle(stage: str, config: ModelConfig, dtype: torch.dtype) -> Tables:
    """Run a few requests through a stage's own pool, without a model, and stop after some forwards."""
    per_token = config.kv_bytes_per_token(dtype)
    engine = find_stage(stage)[1].resolve()(
        ShapeOnly(config, dtype),
        EngineConfig(
            kv_bytes=NUM_BLOCKS * BLOCK_SIZE * per_token,
            max_model_len=128,
            block_size=BLOCK_SIZE,
            kernel="reference",
        ),
    )
    engine.executor = CountingExecutor()
    requests = [
        Request(name, (1,) * prompt, SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True))
        for name, (prompt, answer) in REQUESTS.items()
    ]
    for _ in islice(drive(engine, requests), FORWARDS):
        pass
    running = [seq for seq in engine.sequences() if seq.block_table]
    return Tables(
        {seq.request_id: seq.block_table.copy() for seq in running},
        {seq.request_id: seq.num_computed_tokens for seq in running},
    )


def blocks_picture(stage: str, found: Tables) -> Picture:
    """The tables and the pool of `stage`, with their text equivalent."""
    words = "; ".join(
        f"{name} holds {found.lengths[name]} tokens in blocks {', '.join(map(str, table))}"
        for name, table in found.tables.items()
    )
    figure = block_table(found.tables, NUM_BLOCKS, BLOCK_SIZE, found.lengths)
    caption = (
        f"{stage} after {FORWARDS} forwards: {len(REQUESTS) - len(found.tables)} of {len(REQUESTS)} requests have "
        "ended, and the others have grown into the blocks that those gave back."
    )
    return Picture("blocks", figure, words, caption)
