"""A small beam search with the real model, written down step by step for a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict
from itertools import islice
from typing import Any

from common.beam_params import BeamSearchParams
from common.bench.report import Picture
from common.config import EngineConfig
from common.course.pictures import BeamNode, beam_tree
from common.generate import drive
from common.protocol import Engine, Model, Request
from common.stages import find_stage
from common.tokenizer import Tokenizer

PROMPT = "The lighthouse keeper"
WIDTH, STEPS = 4, 8


def beam_picture(stage: str, recorded: Seq[Seq[Mapping[str, Any]]]) -> Picture:
    """The tree of a search of `WIDTH` beams, with the blocks that they share at the end.

    Args:
        stage: whose it was.
        recorded: what `record_beams` returned.
    """
    steps = [[BeamNode(**beam) for beam in beams] for beams in recorded]
    words = "; ".join(
        f"step {number}: " + ", ".join(f"'{beam.word.strip()}' from beam {beam.parent}" for beam in beams)
        for number, beams in enumerate(steps, 1)
    )
    caption = f"{stage}, {WIDTH} beams, blocks of 4 tokens; recorded from a run with the real model."
    return Picture("beams", beam_tree(PROMPT, steps), f"Beam search from '{PROMPT}'. {words}", caption)


def record_beams(stage: str, model: Model, tokenizer: Tokenizer) -> list[list[dict[str, Any]]]:
    """Run a search and look at its live beams after every step: each as the fields of a `BeamNode`, fit for JSON."""
    config = EngineConfig(
        kv_bytes=128 * model.config.kv_bytes_per_token(model.dtype), max_model_len=64, block_size=4
    )
    engine = find_stage(stage)[1].resolve()(model, config)
    beam = BeamSearchParams(beam_width=WIDTH, max_tokens=STEPS + 2, ignore_eos=True)
    prompt = tuple(tokenizer.encode(PROMPT))
    requests = [Request("beams", prompt, beam.sampling_params(), beam=beam)]
    steps: list[list[dict[str, Any]]] = []
    before = [prompt]
    for _ in islice(drive(engine, requests), STEPS):
        now = [tuple(seq.token_ids) for seq in engine.live["beams"]]
        if now != before:  # a step that computes only a part of the prompt changes nothing
            steps.append([asdict(beam) for beam in _beams(engine, before, tokenizer)])
            before = now
    return steps


def _beams(engine: Engine, before: list[tuple[int, ...]], tokenizer: Tokenizer) -> list[BeamNode]:
    """The live beams; a parent is the one whose text a beam's begins with, as no two beams are the same."""
    live = engine.live["beams"]
    owners = Counter(block for seq in live for block in seq.block_table)
    return [
        BeamNode(
            parent=before.index(tuple(seq.token_ids[:-1])),
            word=tokenizer.decode(seq.token_ids[-1:]),
            shared=sum(owners[block] > 1 for block in seq.block_table),
            own=sum(owners[block] == 1 for block in seq.block_table),
        )
        for seq in live
    ]
