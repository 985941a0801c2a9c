"""A plain sampler to compare with: one row at a time, in numpy float64, written from vLLM's description.

It shares no code with `common.sampling`; where that one sorts, gathers and scatters, this one loops.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from common.protocol import Request
from common.sampling_params import SamplingParams
from common.sequence import Sequence


class FixedRandom:
    """Stands in for a sequence's generator: gives one number, and counts how often it was asked."""

    def __init__(self, number: float) -> None:
        self.number = number
        self.draws = 0

    def random(self) -> float:
        self.draws += 1
        return self.number


def make_sequence(
    params: SamplingParams,
    prompt: tuple[int, ...] = (0,),
    output: tuple[int, ...] = (),
    bad_words: tuple[tuple[int, ...], ...] = (),
    uniform: float | None = None,
) -> Sequence:
    """A sequence in mid-answer; with `uniform`, its next draw is that number."""
    seq = Sequence(Request("r", prompt, params, bad_words))
    seq.token_ids.extend(output)
    if uniform is not None:
        seq.rng = FixedRandom(uniform)
    return seq


def edited(row: np.ndarray, seq: Sequence, eos: frozenset[int]) -> np.ndarray:
    """The row after allowed tokens, bad words, min_tokens, bias and penalties."""
    p, prompt, output = seq.params, seq.token_ids[: seq.num_prompt_tokens], seq.output_token_ids
    x = np.array(row, dtype=np.float64)
    allowed = set(range(len(x))) if p.allowed_token_ids is None else set(p.allowed_token_ids)
    banned = set()
    for word in seq.request.bad_words_token_ids:
        head = list(word[:-1])
        if not head or output[-len(head) :] == head:
            banned.add(word[-1])
    if len(output) < p.min_tokens:
        banned |= set(eos) | set(p.stop_token_ids)
    if not allowed - banned:
        banned = set()
    for token in range(len(x)):
        if token not in allowed or token in banned:
            x[token] = -np.inf
    for token, bias in (p.logit_bias or {}).items():
        x[token] += bias
    for token in set(prompt) | set(output):
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in set(output):
        x[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty
    return x


@dataclass
class Kept:
    """Tokens that may be drawn, in the order they are laid out for the draw."""

    ids: list[int]
    probs: list[float]  # add up to 1
    margin: float  # how far the nearest cut is from falling one token further or less

    def token(self, uniform: float) -> int:
        """The token under a point of the unit line."""
        end = 0.0
        for token, prob in zip(self.ids, self.probs, strict=True):
            end += prob
            if uniform < end:
                return token
        return self.ids[-1]


def softmax(x: np.ndarray) -> np.ndarray:
    """Probabilities of a row, in float64."""
    e = np.exp(x - x.max())
    return e / e.sum()


def kept(x: np.ndarray, p: SamplingParams) -> Kept:
    """What temperature, min-p, top-k and top-p leave of an edited row."""
    width, margin = len(x), np.inf
    prob = softmax((x - x.max()) / p.temperature)
    order = sorted(range(width), key=lambda token: (-x[token], token))
    if p.min_p > 0:
        least = p.min_p * prob.max()
        margin = min([margin, *(abs(q - least) / max(q, least) for q in prob if q != least)])
        order = [token for token in order if prob[token] >= least]
    if p.top_k > 0:
        order = order[: p.top_k]
    if p.top_p < 1:
        total, mass, size = sum(prob[token] for token in order), 0.0, 0
        while size < len(order) and mass < p.top_p * total:
            mass += prob[order[size]]
            size += 1
            margin = min(margin, abs(mass / total - p.top_p))
        order = order[:size]
    order = [token for token in order if prob[token] > 0]
    if not (0 < p.top_k < width or p.top_p < 1):
        order.sort()
    total = sum(prob[token] for token in order)
    return Kept(order, [prob[token] / total for token in order], margin)
