"""Log probabilities: raw, ranked, and of the right tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sampling_reference import make_sequence, softmax

from common.protocol import Logprob
from common.sampling import gather_logprobs, sample
from common.sampling_params import SamplingParams

LOGITS = [1.0, 0.0, -1.0, -2.0]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.5, "top_p": 0.9},
        {"temperature": 0},
        {"top_k": 1, "min_p": 0.3},
        {"logit_bias": {0: 50.0}, "repetition_penalty": 1.5},
        {"allowed_token_ids": [0]},
    ],
    ids=str,
)
def test_raw_at_every_setting(fields: dict) -> None:
    """B98: the rule is raw: -0.4402 for token 0 of [1, 0, -1, -2], whatever temperature, cuts and bias do."""
    seq = make_sequence(SamplingParams(logprobs=3, **fields), uniform=0.0)
    (token,) = sample(torch.tensor([LOGITS]), [seq], frozenset())
    assert token.token_id == 0
    assert token.logprobs[0].logprob == pytest.approx(-0.4402, abs=1e-4)
    assert list(token.logprobs) == [0, 1, 2]
    assert [entry.rank for entry in token.logprobs.values()] == [1, 2, 3]


def test_chosen_token_comes_on_top_of_the_likeliest() -> None:
    """Two likeliest and a third that was drawn make three entries; none asked for gives None."""
    rows = [make_sequence(SamplingParams(logprobs=n), uniform=0.999) for n in (2, 0, None, -1, 99)]
    got = sample(torch.tensor([LOGITS]).repeat(5, 1), rows, frozenset())
    assert {token.token_id for token in got} == {3}
    assert [None if t.logprobs is None else list(t.logprobs) for t in got] == [
        [3, 0, 1],
        [3],
        None,
        [3, 0, 1, 2],
        [3, 0, 1, 2],
    ]
    assert got[0].logprobs[3].rank == 4


def test_equals_share_a_rank() -> None:
    """Rank is 1 + the number of strictly larger logits; equals are listed by id."""
    logits = torch.tensor([[2.0, 3.0, 2.0, 1.0]])
    (found,) = gather_logprobs(logits, [2], -1)
    assert {token: entry.rank for token, entry in found.items()} == {2: 2, 1: 1, 0: 2, 3: 4}
    (flat,) = gather_logprobs(torch.zeros(1, 5), [4], -1)
    assert list(flat) == [4, 0, 1, 2, 3]
    assert {entry.rank for entry in flat.values()} == {1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("n", [1, 63, 64, 65, 200])
def test_many_rows_against_numpy(dtype: torch.dtype, n: int) -> None:
    """As for a long prompt's rows: each equals a float64 log softmax of the same logits, ranks included."""
    logits = (torch.randn(n, 90, generator=torch.Generator().manual_seed(n)) * 4).to(dtype)
    tokens = torch.randint(0, 90, (n,), generator=torch.Generator().manual_seed(1)).tolist()
    found = gather_logprobs(logits, tokens, 4)
    assert len(found) == n
    for row, token, entries in zip(logits.double().numpy(), tokens, found, strict=True):
        expected = np.log(softmax(row))
        assert next(iter(entries)) == token
        assert set(np.sort(row)[::-1][:4]) <= {row[i] for i in entries}
        for i, entry in entries.items():
            assert entry.logprob == pytest.approx(expected[i], abs=1e-5)
            assert entry.rank == 1 + int((row > row[i]).sum())


def test_nothing_asked_and_no_rows() -> None:
    """Count 0 gives the known token alone; no rows give no entries."""
    (found,) = gather_logprobs(torch.tensor([[0.0, 0.0]]), [1], 0)
    assert found == {1: Logprob(pytest.approx(math.log(0.5)), 1)}
    assert gather_logprobs(torch.zeros(0, 7), [], 3) == []
