"""The oracle: transformers' `generate` on the same tiny random weights."""

from __future__ import annotations

from functools import cache

import torch
from support.hf_oracle import make_pair
from transformers import PreTrainedModel

from common.model.decoder import Decoder

NEAR_TIE = 1e-7


@cache
def tiny_pair(variant: str) -> tuple[PreTrainedModel, Decoder]:
    """(transformers model, our decoder) with the same random weights, in float64."""
    return make_pair(variant)


@cache
def greedy(
    hf: PreTrainedModel, prompt: tuple[int, ...], max_tokens: int, eos_token_id: int | None = None
) -> list[int]:
    """The greedy answer; fails on a near tie, where equality would prove nothing about the engine."""
    with torch.inference_mode():
        out = hf.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=eos_token_id,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    for logits in out.logits:
        best, second = logits[0].topk(2).values.tolist()
        assert best - second > NEAR_TIE, "choose another prompt: its two likeliest tokens are a tie"
    return out.sequences[0, len(prompt) :].tolist()
