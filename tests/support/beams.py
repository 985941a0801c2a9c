"""Beam search by transformers, and by us in each of our ways."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from copy import copy
from dataclasses import replace
from unittest.mock import patch

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMode

from common.beam_params import BeamSearchParams
from common.generate import drive
from common.model.decoder import Decoder
from common.protocol import Engine, Request, StepOutput
from stage5_prefix_sharing.beam_resubmit import ResubmittedBeams

Answer = tuple[list[int], float]
"""Token ids, the ending one included, and the score."""


@torch.inference_mode()
def hf_beams(
    hf: PreTrainedModel, prompts: Seq[Seq[int]], params: BeamSearchParams, eos: Iterable[int]
) -> list[list[Answer]]:
    """What transformers' beam search answers to prompts of one length, so that none is padded.

    `generate` takes one beam for greedy search; here it is told that it is a beam search.
    """
    ends = sorted(params.ends(tuple(eos)))
    config = GenerationConfig(
        num_beams=params.beam_width,
        num_return_sequences=params.n,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=ends or None,
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    ids = torch.tensor(prompts)
    as_beams = patch.object(GenerationConfig, "get_generation_mode", lambda *_: GenerationMode.BEAM_SEARCH)
    # Patched and put back: the model is shared with tests that ask it for greedy answers.
    with patch.object(hf, "generation_config", config), as_beams:
        out = hf.generate(ids, attention_mask=torch.ones_like(ids))
    lengths = (out.beam_indices >= 0).sum(dim=-1).tolist()
    rows = [
        (row[ids.shape[1] : ids.shape[1] + length].tolist(), score)
        for row, length, score in zip(out.sequences, lengths, out.sequences_scores.tolist(), strict=True)
    ]
    return [rows[i : i + params.n] for i in range(0, len(rows), params.n)]


def with_eos(decoder: Decoder, eos: Iterable[int]) -> Decoder:
    """The same model with other end-of-sequence ids."""
    changed = copy(decoder)
    changed.config = replace(decoder.config, eos_token_ids=frozenset(eos))
    return changed


def beam_request(name: str, prompt: Iterable[int], params: BeamSearchParams, **fields: object) -> Request:
    """A request for a beam search."""
    return Request(name, tuple(prompt), params.sampling_params(), beam=params, **fields)


def resubmit(engine: Engine, requests: Iterable[Request]) -> dict[str, list[StepOutput]]:
    """Run requests, beam searches among them above the engine; what was said about each."""
    beams, said = ResubmittedBeams(engine), {}
    first = [r for request in requests for r in (beams.start(request) if request.beam else [request])]
    for outputs in drive(engine, first):
        news, following = beams.take(outputs)
        for request in following:
            engine.add_request(request)
        for out in news:
            said.setdefault(out.request_id, []).append(out)
    assert beams.searches == beams.search_of == {}
    return said


def scored(outputs: Iterable[StepOutput], params: BeamSearchParams) -> list[Answer]:
    """The answers of one search with their scores, from the log probabilities of their tokens."""
    answers = []
    for index, out in enumerate(outputs):
        assert out.index == index
        tokens = list(out.new_token_ids)
        assert [list(entry) for entry in out.logprobs] == [[token] for token in tokens]
        logprob = sum(entry[token].logprob for entry, token in zip(out.logprobs, tokens, strict=True))
        answers.append((tokens, params.score(logprob, len(tokens))))
    return answers
