"""Each parameter against transformers' own processor, on the same float64 logits."""

from __future__ import annotations

import pytest
import torch
from sampling_reference import make_sequence
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from common.sampling import sample
from common.sampling.edits import edit_logits
from common.sampling_params import SamplingParams

V = 60
PROMPT, OUTPUT = (7, 7, 3, 12), (5, 9, 5, 31)
EOS = frozenset({2, 40})


@pytest.fixture
def logits() -> torch.Tensor:
    """`[1, V]`, with positive and negative numbers."""
    return torch.randn(1, V, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 2


EDITS = {
    "repetition": (
        SamplingParams(repetition_penalty=1.3),
        (),
        RepetitionPenaltyLogitsProcessor(1.3),
    ),
    "repetition below 1": (
        SamplingParams(repetition_penalty=0.7),
        (),
        RepetitionPenaltyLogitsProcessor(0.7),
    ),
    "bias": (
        SamplingParams(logit_bias={4: 3.5, 9: -100.0, 59: 0.25}),
        (),
        SequenceBiasLogitsProcessor([[[4], 3.5], [[9], -100.0], [[59], 0.25]]),
    ),
    "bad words": (
        SamplingParams(),
        ((8,), (31, 11), (5, 31, 13), (9, 31, 14), (9, 5, 31, 15)),
        NoBadWordsLogitsProcessor([[8], [31, 11], [5, 31, 13], [9, 31, 14], [9, 5, 31, 15]]),
    ),
    "min tokens, not yet": (
        SamplingParams(min_tokens=5),
        (),
        MinNewTokensLengthLogitsProcessor(len(PROMPT), 5, sorted(EOS)),
    ),
    "min tokens, reached": (
        SamplingParams(min_tokens=4),
        (),
        MinNewTokensLengthLogitsProcessor(len(PROMPT), 4, sorted(EOS)),
    ),
    "allowed": (
        SamplingParams(allowed_token_ids=[1, 30, 59]),
        (),
        PrefixConstrainedLogitsProcessor(lambda _row, _ids: [1, 30, 59], num_beams=1),
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_edit_equals_transformers(name: str, logits: torch.Tensor) -> None:
    """The edited logits are those of transformers' processor."""
    params, bad_words, processor = EDITS[name]
    expected = processor(torch.tensor([PROMPT + OUTPUT]), logits.clone())
    scores = logits.clone()
    edit_logits(scores, [make_sequence(params, PROMPT, OUTPUT, bad_words)], EOS)
    torch.testing.assert_close(scores, expected, rtol=1e-14, atol=0)
    changed = name != "min tokens, reached"
    assert torch.equal(scores, logits) != changed


CUTS = {
    "temperature": ({"temperature": 0.6}, [TemperatureLogitsWarper(0.6)]),
    "top_k": ({"top_k": 7}, [TopKLogitsWarper(7)]),
    "top_p": ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
    "min_p": ({"min_p": 0.05}, [MinPLogitsWarper(0.05)]),
    "temperature, top_k, top_p": (
        {"temperature": 1.7, "top_k": 9, "top_p": 0.7},
        [TemperatureLogitsWarper(1.7), TopKLogitsWarper(9), TopPLogitsWarper(0.7)],
    ),
    "temperature, min_p, top_k, top_p (vLLM's order)": (
        {"temperature": 2.0, "min_p": 0.1, "top_k": 9, "top_p": 0.8},
        [TemperatureLogitsWarper(2.0), MinPLogitsWarper(0.1), TopKLogitsWarper(9), TopPLogitsWarper(0.8)],
    ),
}


@pytest.mark.parametrize("name", CUTS)
def test_probabilities_equal_transformers(name: str, logits: torch.Tensor) -> None:
    """Each token is drawn over a stretch of [0, 1) as long as its probability after transformers' warpers."""
    fields, warpers = CUTS[name]
    probs = LogitsProcessorList(warpers)(torch.tensor([PROMPT]), logits.clone()).softmax(-1)[0]
    order = [i for i in range(V) if probs[i] > 0]
    if "top_k" in fields or "top_p" in fields:
        order.sort(key=lambda token: -probs[token].item())
    points, tokens, start = [], [], 0.0
    for token in order:
        points += [start + 1e-4 * probs[token].item(), start + 0.9999 * probs[token].item()]
        tokens += [token, token]
        start += probs[token].item()
    rows = [make_sequence(SamplingParams(**fields), PROMPT, uniform=point) for point in points]
    got = sample(logits.repeat(len(rows), 1), rows, EOS)
    assert [t.token_id for t in got] == tokens
    assert len(order) > 1
