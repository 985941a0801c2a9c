"""Public faults of other samplers, as small cases with a known answer (KNOWN_FAULTS, by row id)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sampling_reference import edited, make_sequence

from common.errors import ModelError
from common.sampling import sample
from common.sampling.edits import edit_logits
from common.sampling_params import SamplingParams
from common.sequence import Sequence

NONE = frozenset()
ALMOST_ONE = math.nextafter(1.0, 0.0)


def one(logits: list[float] | torch.Tensor, uniform: float = 0.5, **fields) -> int:
    """The token of a single row."""
    row = torch.as_tensor(logits)[None]
    return sample(row, [make_sequence(SamplingParams(**fields), uniform=uniform)], NONE)[0].token_id


def points_that_give(token: int, logits: list[float], **fields) -> float:
    """Share of [0, 1) that draws a token."""
    n = 1000
    rows = [make_sequence(SamplingParams(**fields), uniform=(i + 0.5) / n) for i in range(n)]
    return sum(t.token_id == token for t in sample(torch.tensor(logits).repeat(n, 1), rows, NONE)) / n


def test_ids_beyond_the_tokenizer() -> None:
    """B82: logits of width 320, a tokenizer of 300: ids from 300 up are drawn (their text is empty)."""
    logits = torch.randn(200, 320, generator=torch.Generator().manual_seed(0))
    rows = [Sequence(make_sequence(SamplingParams(seed=i)).request) for i in range(200)]
    ids = [t.token_id for t in sample(logits, rows, NONE)]
    assert all(0 <= i < 320 for i in ids)
    assert any(i >= 300 for i in ids)


def test_added_token_is_penalised() -> None:
    """B83: id 303, above the tokenizer's vocab_size of 300 but below the logit width, is penalised."""
    scores = torch.ones(1, 320)
    edit_logits(scores, [make_sequence(SamplingParams(repetition_penalty=1.2), prompt=(303,))], NONE)
    assert scores[0, 303].item() == pytest.approx(1 / 1.2)
    assert (scores[0] != 1).sum() == 1


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9, "top_k": 5}], ids=str)
def test_tiny_temperature(temperature: float, dtype: torch.dtype, cut: dict) -> None:
    """B86: top 11.06, next 10.06: every tiny temperature takes the largest, nothing overflows."""
    logits = torch.full((70,), -20.0)
    logits[[40, 41]] = torch.tensor([10.06, 11.06])
    for uniform in (0.0, 0.5, ALMOST_ONE):
        assert one(logits.to(dtype), uniform, temperature=temperature, **cut) == 41


def test_tiny_temperature_keeps_small_differences() -> None:
    """B86: 20 and 20 - 2^-19 at temperature 1e-5 are .547 and .453: the maximum goes before the division.

    Divided first, both would be rounded to multiples of 0.125 near 2,000,000.  And 1e34 would overflow.
    """
    share = points_that_give(0, [20.0, 20.0 - 2**-19], temperature=1e-5)
    assert share == pytest.approx(1 / (1 + math.exp(-(2**-19) / 1e-5)), abs=0.002)
    assert one([0.0, 1e34, 0.0], temperature=1e-5) == 1


@pytest.mark.parametrize("temperature", [1e30, 1e300])
def test_huge_temperature(temperature: float) -> None:
    """B86, the other end: a temperature beyond float32 makes the row flat, and masked tokens stay masked."""
    drawn = {
        one([5.0, -5.0, 0.0], u, temperature=temperature, allowed_token_ids=[0, 1]) for u in (0.1, 0.4, 0.6)
    }
    assert drawn == {0, 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_greedy_ties(dtype: torch.dtype) -> None:
    """B88: ties go to the lowest id, alone and beside random rows, 100 times; likewise with top_k=1."""
    tie = torch.tensor([1.0, 1.0, 0.0], dtype=dtype)
    for i in range(100):
        rows = [
            make_sequence(SamplingParams(temperature=0), uniform=0.5),
            make_sequence(SamplingParams(temperature=2.0, seed=i)),
            make_sequence(SamplingParams(top_k=1), uniform=i / 100),
            make_sequence(SamplingParams(top_k=1, top_p=0.5, temperature=3.0), uniform=i / 100),
        ]
        assert [t.token_id for t in sample(tie.repeat(4, 1), rows, NONE)][::2] == [0, 0]
        assert sample(tie[None], rows[:1], NONE)[0].token_id == 0
        assert sample(tie.repeat(4, 1), rows, NONE)[3].token_id == 0


@pytest.mark.parametrize("width", [2, 64, 257, 49152])
def test_greedy_tie_far_apart(width: int) -> None:
    """B88: the lowest id wins wherever the equals stand, in every vector lane."""
    for first in {0, width // 3, width // 2, width - 2}:
        logits = torch.zeros(width)
        logits[[first, width - 1]] = 1.0
        for dtype in (torch.float32, torch.bfloat16):
            assert one(logits.to(dtype), temperature=0) == first


def test_top_k_mixed_and_too_large() -> None:
    """B89: 2, -1, 0 and 10000000 in one batch, 300 tokens: off is off, large is clamped, each as alone."""
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(8))
    for point in np.linspace(0, 0.999, 50):
        rows = [make_sequence(SamplingParams(top_k=k), uniform=float(point)) for k in (2, -1, 0, 10_000_000)]
        together = [t.token_id for t in sample(logits, rows, NONE)]
        assert together == [sample(logits[i : i + 1], [rows[i]], NONE)[0].token_id for i in range(4)]
        assert together[0] in logits[0].topk(2).indices.tolist()
        assert together[1:] == [one(row, float(point)) for row in logits[1:]]


@pytest.mark.parametrize("uniform", [0.0, 0.9999999, ALMOST_ONE])
@pytest.mark.parametrize("fields", [{}, {"top_p": 0.999}, {"top_k": 31_999}, {"min_p": 1e-6}], ids=str)
@pytest.mark.parametrize("hot", [0, 255, 256, 31_999])
def test_draw_at_the_ends_of_a_one_hot_row(uniform: float, fields: dict, hot: int) -> None:
    """B91: the only token with a weight is drawn, also where the point lies above the last rounded sum."""
    logits = torch.full((32_000,), -torch.inf)
    logits[hot] = 3.0
    assert one(logits, uniform, **fields) == hot


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.999}, {"min_p": 1e-3}], ids=str)
def test_draw_at_the_end_of_a_masked_tail(fields: dict) -> None:
    """B91: the last tokens of a block have no weight, and its sums round differently: none is drawn."""
    for seed in range(40):
        logits = torch.randn(512, generator=torch.Generator().manual_seed(seed))
        logits[200:256] = logits[450:] = -torch.inf
        assert logits[one(logits, ALMOST_ONE, **fields)].isfinite()


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.5}, {"top_k": 100}], ids=str)
def test_draw_at_the_ends_of_a_flat_row(fields: dict) -> None:
    """B91: a flat float16 row: first and last of the kept tokens, in range."""
    logits = torch.zeros(32_000, dtype=torch.float16)
    last = {"": 31_999, "top_p": 15_999, "top_k": 99}[next(iter(fields), "")]
    assert one(logits, 0.0, **fields) == 0
    # float32 probabilities of 1/32000 do not add up to exactly 1, so top-p may fall one token further
    slack = 1 if "top_p" in fields else 0
    assert abs(one(logits, ALMOST_ONE, **fields) - last) <= slack


def test_temperature_comes_before_the_cuts() -> None:
    """B92: [3, 2, 1] at temperature .5 is .867 .117 .016, so top_p .8 keeps {0}; min_p .2 wants .2 x .867."""
    logits = [3.0, 2.0, 1.0]
    assert points_that_give(0, logits, temperature=0.5) == pytest.approx(0.867, abs=0.001)
    assert points_that_give(1, logits, temperature=0.5) == pytest.approx(0.117, abs=0.001)
    assert points_that_give(0, logits, temperature=0.5, top_p=0.8) == 1.0
    assert points_that_give(0, logits, temperature=0.5, min_p=0.2) == 1.0
    # at temperature 1: .665 .245 .090, and .2 x .665 = .133 keeps the second and drops the third
    assert points_that_give(1, logits, min_p=0.2) == pytest.approx(0.245 / 0.91, abs=0.001)
    assert points_that_give(2, logits, min_p=0.2) == 0.0


def test_top_p_reached_exactly() -> None:
    """Probabilities .5 and .5 with top_p .5: the first token reaches it, the second is not needed."""
    assert points_that_give(0, [1.0, 1.0], top_p=0.5) == 1.0
    assert points_that_give(1, [0.0, 0.0, 0.0, 0.0], top_p=0.75) == pytest.approx(1 / 3, abs=0.001)
    assert points_that_give(3, [0.0, 0.0, 0.0, 0.0], top_p=0.75) == 0.0


def test_repetition_penalty_counts_the_prompt() -> None:
    """B95: 2.0 and -2.0 of two prompt tokens become 1.6667 and -2.4 at once; seen twice is penalised once."""
    scores = torch.tensor([[2.0, -2.0, 0.5]])
    edit_logits(scores, [make_sequence(SamplingParams(repetition_penalty=1.2), prompt=(0, 1, 0))], NONE)
    torch.testing.assert_close(scores, torch.tensor([[2 / 1.2, -2.4, 0.5]]))


def test_repetition_penalty_counts_the_answer_once() -> None:
    """B95: a token that stands in prompt and answer is penalised once."""
    scores = torch.tensor([[2.0, -2.0, 0.5]])
    seq = make_sequence(SamplingParams(repetition_penalty=1.2), prompt=(0,), output=(0, 2))
    edit_logits(scores, [seq], NONE)
    torch.testing.assert_close(scores, torch.tensor([[2 / 1.2, -2.0, 0.5 / 1.2]]))


def test_presence_and_frequency_look_at_the_answer_only() -> None:
    """Once for presence, per occurrence for frequency, nothing for the prompt (vLLM, OpenAI)."""
    scores = torch.zeros(1, 5)
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    edit_logits(scores, [make_sequence(params, prompt=(0, 0, 1), output=(1, 2, 2, 2))], NONE)
    torch.testing.assert_close(scores, torch.tensor([[0.0, -0.75, -1.25, 0.0, 0.0]]))


def test_penalties_with_prompts_of_different_length() -> None:
    """B97: prompts of 3 and 9 tokens, penalties on one row: only its own tokens are touched, EOS is not."""
    eos = 0
    short = make_sequence(SamplingParams(repetition_penalty=1.5, presence_penalty=1.0), (4, 5, 6), (7,))
    long = make_sequence(SamplingParams(), tuple(range(10, 19)))
    logits = torch.ones(2, 20)
    scores = logits.clone()
    edit_logits(scores, [short, long], frozenset({eos}))
    assert torch.equal(scores[1], logits[1])
    assert scores[0, eos] == 1.0
    np.testing.assert_allclose(scores[0].numpy(), edited(logits[0].numpy(), short, frozenset()), rtol=1e-6)
    alone = logits[:1].clone()
    edit_logits(alone, [short], frozenset({eos}))
    assert torch.equal(alone[0], scores[0])


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e300])
def test_extreme_repetition_penalty(penalty: float) -> None:
    """A penalty beyond float32 gives huge numbers but no NaN, and unmasks nothing."""
    scores = torch.tensor([[2.0, -2.0, 0.0, 1.0]])
    params = SamplingParams(repetition_penalty=penalty, allowed_token_ids=[0, 1, 2])
    edit_logits(scores, [make_sequence(params, prompt=(0, 1, 2, 3))], NONE)
    assert scores[0, :3].isfinite().all()
    assert scores[0, 3] == -torch.inf
    assert one([2.0, -2.0, 0.0], repetition_penalty=penalty) in (0, 1, 2)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens(ignore_eos: bool) -> None:
    """Until there are enough, neither EOS (also under ignore_eos, as in vLLM) nor a stop id can come."""
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[1], ignore_eos=ignore_eos)
    logits = torch.tensor([[9.0, 8.0, 7.0, 6.0]])
    for output, expected in [((), 2), ((3,), 2), ((3, 3), 0)]:
        assert sample(logits, [make_sequence(params, output=output)], frozenset({0}))[0].token_id == expected


def test_bad_word_matches_the_answer_not_the_prompt() -> None:
    """The beginning of a bad word must stand in the answer; a shorter answer does not match."""
    params, word = SamplingParams(temperature=0), ((5, 6, 2),)
    logits = torch.tensor([[0.0, 1.0, 2.0, 0.0, 0.0, 0.0, 0.0]])
    for prompt, output, expected in [((0,), (5, 6), 1), ((5, 6), (), 2), ((5,), (6,), 2), ((0,), (6, 5), 2)]:
        assert sample(logits, [make_sequence(params, prompt, output, word)], NONE)[0].token_id == expected


def test_ids_beyond_the_logits_cannot_come_anyway() -> None:
    """An EOS id or bad word of a wider tokenizer is no index error."""
    seq = make_sequence(SamplingParams(temperature=0, min_tokens=1), bad_words=((99,), (0,)))
    assert sample(torch.tensor([[3.0, 2.0]]), [seq], frozenset({50}))[0].token_id == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bans_that_leave_nothing_are_lifted(temperature: float) -> None:
    """If min_tokens and bad words would leave no token, they give way in that step; allowed ids never do."""
    params = {"temperature": temperature, "min_tokens": 3, "stop_token_ids": [2]}
    eos, logits = frozenset({1}), torch.tensor([[5.0, 1.0, 1.0, 0.0]])
    seqs = [
        make_sequence(SamplingParams(allowed_token_ids=[1, 2], **params), uniform=0.0),
        make_sequence(SamplingParams(**params), bad_words=((0,), (3,)), uniform=0.0),
        make_sequence(SamplingParams(allowed_token_ids=[1, 3], **params), uniform=0.0),
    ]
    got = [t.token_id for t in sample(logits.repeat(3, 1), seqs, eos)]
    assert got == [1, 0, 3]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("fields", [{"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.5}], ids=str)
@pytest.mark.parametrize("width", [4, 300, 2000])
def test_broken_logits_are_an_error(bad: float, fields: dict, width: int) -> None:
    """NaN or +inf from the model is reported with the request's id; it never becomes a token."""
    logits = torch.zeros(width)
    logits[2] = bad
    with pytest.raises(ModelError, match=f"logits of request 'r'.*{bad}"):
        one(logits, **fields)


def test_row_of_minus_infinity_is_an_error() -> None:
    """A model that rules out every token is broken too."""
    with pytest.raises(ModelError, match="-inf"):
        one([-math.inf] * 3)
