"""Beam search equals transformers' token for token and score for score, in both of our ways."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch
from support.beams import Answer, beam_request, hf_beams, resubmit, scored, with_eos
from support.engines import build, run
from support.hf_oracle import make_pair, random_prompts

from common.beam_params import BeamSearchParams
from common.model.decoder import Decoder

VOCAB = 16  # so few that every id comes up, and searches of several EOS ids end at all lengths
EOS_SETS = ((), (2,), (2, 7), (7, 9, 2))
PENALTIES = (1.0, 2.0, 0.0, -1.0)
EARLY = (False, True, "never")
WAYS = {
    "fork": ("stage5_prefix_sharing", run, {}),
    "resubmit": ("stage5_prefix_sharing", resubmit, {}),
    "resubmit without a cache": ("stage4_continuous", resubmit, {}),
}


@cache
def small_pair(dtype: torch.dtype = torch.float64):
    """A model whose beam searches take milliseconds."""
    return make_pair(
        "llama", dtype, seed=3, vocab_size=VOCAB, num_hidden_layers=1, hidden_size=24, intermediate_size=32,
        num_attention_heads=3, num_key_value_heads=1,
    )  # fmt: skip


PROMPTS = random_prompts([5, 5, 5, 5], VOCAB, seed=3)


def ours(way: str, decoder: Decoder, prompts, params: BeamSearchParams, eos, **options) -> list[list[Answer]]:
    """The answers to all prompts, searched in one crowd."""
    stage, through, settings = WAYS[way]
    engine = build(stage, with_eos(decoder, eos), **({"max_num_seqs": 32} | settings | options))
    requests = [beam_request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    said = through(engine, requests)
    return [scored(said[request.request_id], params) for request in requests]


def assert_equal(got: list[list[Answer]], want: list[list[Answer]], tolerance: float = 2e-6) -> None:
    """Same tokens; scores to the precision of transformers' float32 sums."""
    for ours_, theirs in zip(got, want, strict=True):
        assert [tokens for tokens, _ in ours_] == [tokens for tokens, _ in theirs]
        assert [s for _, s in ours_] == pytest.approx([s for _, s in theirs], rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("width", range(1, 9))
def test_whole_grid(width):
    """B35: every width, sign of the penalty, way of stopping and set of EOS ids."""
    hf, decoder = small_pair()
    lengths = set()
    for eos, penalty, early in product(EOS_SETS, PENALTIES, EARLY):
        params = BeamSearchParams(width, n=width, max_tokens=10, length_penalty=penalty, early_stopping=early)
        want = hf_beams(hf, PROMPTS, params, eos)
        assert_equal(ours("fork", decoder, PROMPTS, params, eos), want)
        lengths |= {len(tokens) for answers in want for tokens, _ in answers}
    assert width == 1 or len(lengths) > 4, "answers were meant to end at many lengths"


def test_the_grid_tells_the_options_apart():
    """Each way of stopping and each penalty answers something of its own, so equality means something."""
    hf, _ = small_pair()

    def answers(penalty: float, early: bool | str) -> str:
        params = BeamSearchParams(4, n=4, max_tokens=10, length_penalty=penalty, early_stopping=early)
        return str([[tokens for tokens, _ in some] for some in hf_beams(hf, PROMPTS, params, (2, 7))])

    assert len({answers(1.0, early) for early in EARLY}) == 3
    assert len({answers(penalty, "never") for penalty in PENALTIES}) == 4


@pytest.mark.parametrize("way", [way for way in WAYS if way != "fork"])
@pytest.mark.parametrize("width", [1, 2, 5, 8])
def test_resubmitting(way, width):
    """The same answers from above the engine."""
    hf, decoder = small_pair()
    for eos, penalty, early in product(((), (7, 9, 2)), (1.0, -1.0), EARLY):
        params = BeamSearchParams(width, n=width, max_tokens=8, length_penalty=penalty, early_stopping=early)
        assert_equal(ours(way, decoder, PROMPTS, params, eos), hf_beams(hf, PROMPTS, params, eos))


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_number_of_answers(n):
    """`n` of a width of 5, for transformers `num_return_sequences`."""
    hf, decoder = small_pair()
    params = BeamSearchParams(5, n=n, max_tokens=8)
    got = ours("fork", decoder, PROMPTS, params, (2, 7))
    assert [len(answers) for answers in got] == [n] * 4
    assert_equal(got, hf_beams(hf, PROMPTS, params, (2, 7)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ends", [{"stop_token_ids": [9]}, {"ignore_eos": True},
                                  {"ignore_eos": True, "stop_token_ids": [9, 4]}])  # fmt: skip
def test_stop_ids_and_ignore_eos(way, ends):
    """B37: to transformers a stop id is one more EOS id, and an ignored one is none."""
    hf, decoder = small_pair()
    params = BeamSearchParams(4, n=4, max_tokens=8, **ends)
    got = ours(way, decoder, PROMPTS, params, (2, 7))
    assert_equal(got, hf_beams(hf, PROMPTS, params, (2, 7)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("variant", ["qwen3-tied-biases", "mistral-window", "llama-llama3"])
def test_other_families(way, variant):
    """Three layers, 97 tokens, prompts of several lengths in one crowd, each by itself in transformers."""
    hf, decoder = make_pair(variant)
    prompts = random_prompts([3, 9, 17, 8], seed=4)
    free = BeamSearchParams(4, n=4, max_tokens=12)
    said = ours("fork", decoder, prompts, free, ())
    eos = {answers[1][0][4] for answers in said} | {said[0][3][0][7]}  # ids that do come up
    params = BeamSearchParams(4, n=3, max_tokens=12, early_stopping="never")
    want = [answers for prompt in prompts for answers in hf_beams(hf, [prompt], params, eos)]
    assert len({len(tokens) for answers in want for tokens, _ in answers}) > 2
    assert_equal(ours(way, decoder, prompts, params, eos), want)


@pytest.mark.parametrize("way", WAYS)
def test_neighbours_do_not_change_the_length_that_counts(way):
    """B34: prompts of 3 and 9 tokens, 2 beams, penalty 3: in a batch as alone."""
    hf, decoder = small_pair()
    prompts = random_prompts([3, 9], VOCAB, seed=2)
    params = BeamSearchParams(2, n=2, max_tokens=9, length_penalty=3.0, early_stopping="never")
    alone = [ours(way, decoder, [prompt], params, (2, 7))[0] for prompt in prompts]
    assert_equal(ours(way, decoder, prompts, params, (2, 7)), alone, 1e-13)
    assert_equal(alone, [hf_beams(hf, [prompt], params, (2, 7))[0] for prompt in prompts])


@pytest.mark.parametrize("way", WAYS)
def test_float32(way):
    """The same in the precision that a real model is served in."""
    hf, decoder = small_pair(torch.float32)
    params = BeamSearchParams(6, n=6, max_tokens=10)
    assert_equal(ours(way, decoder, PROMPTS, params, (2, 7)), hf_beams(hf, PROMPTS, params, (2, 7)), 1e-5)
