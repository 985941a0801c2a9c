"""Every mix of parameters, against a plain sampler written row by row (sampling_reference.py)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sampling_reference import edited, kept, make_sequence

from common.sampling import sample
from common.sampling.edits import edit_logits, needs_edits
from common.sampling_params import SamplingParams

V = 23
TOKEN = st.integers(0, V - 1)


def number(low: float, high: float) -> st.SearchStrategy[float]:
    """Mostly round numbers, so that ties and exact thresholds come up.

    None below 1e-4: a bias of 1e-300 splits a tie here and is lost there, when the maximum is subtracted.
    """
    return st.one_of(
        st.floats(low, high).map(lambda x: round(x, 4)),
        st.integers(int(low * 4) + 1, int(high * 4)).map(lambda i: min(i / 4, high)),
    )


def params(temperature: st.SearchStrategy[float]) -> st.SearchStrategy[SamplingParams]:
    """Sampling parameters, each field either off or anything."""
    return st.builds(
        SamplingParams,
        temperature=temperature,
        top_k=st.sampled_from([0, -1, 1, 2, 3, 7, V - 1, V, V + 1, 10**12]),
        top_p=st.one_of(st.just(1.0), number(0.05, 1.0)),
        min_p=st.one_of(st.just(0.0), number(0.0, 1.0)),
        presence_penalty=st.one_of(st.just(0.0), number(-2, 2)),
        frequency_penalty=st.one_of(st.just(0.0), number(-2, 2)),
        repetition_penalty=st.one_of(st.just(1.0), number(0.5, 2.0)),
        min_tokens=st.integers(0, 6),
        ignore_eos=st.booleans(),
        stop_token_ids=st.lists(TOKEN, max_size=2),
        logit_bias=st.one_of(st.none(), st.dictionaries(TOKEN, number(-3, 3), max_size=3)),
        allowed_token_ids=st.one_of(st.none(), st.lists(TOKEN, min_size=1, max_size=V)),
    )


@st.composite
def cases(draw: st.DrawFn, temperature: st.SearchStrategy[float]) -> tuple:
    """One row: what `make_sequence` needs, and float64 logits, often with ties."""
    output = tuple(draw(st.lists(TOKEN, max_size=6)))
    words = draw(st.lists(st.lists(TOKEN, min_size=1, max_size=3).map(tuple), max_size=3))
    if output:  # a word whose beginning has just been written
        words.append((*output[-draw(st.integers(1, len(output))) :], draw(TOKEN)))
    logits = np.random.default_rng(draw(st.integers(0, 10**6))).normal(size=V) * 2
    if draw(st.booleans()):
        logits = np.round(logits)
    seq = {
        "params": draw(params(temperature)),
        "prompt": tuple(draw(st.lists(TOKEN, min_size=1, max_size=5))),
        "output": output,
        "bad_words": tuple(words) if draw(st.booleans()) else (),
    }
    return seq, logits, frozenset(draw(st.sets(TOKEN, max_size=2)))


SAMPLED = cases(number(0.1, 3.0))
ANY = cases(st.one_of(st.just(0.0), number(0.1, 3.0)))


@settings(deadline=None, max_examples=200)
@given(cases(st.just(0.0)))
def test_edits_equal_the_reference(case: tuple) -> None:
    """Masks, bias and penalties give the reference's numbers; `needs_edits` misses no changed row."""
    kwargs, logits, eos = case
    seq = make_sequence(**kwargs)
    scores = torch.tensor(logits)[None]
    edit_logits(scores, [seq], eos)
    expected = edited(logits, seq, eos)
    np.testing.assert_allclose(scores[0].numpy(), expected, rtol=1e-12, atol=1e-12)
    if not needs_edits(seq):
        np.testing.assert_array_equal(expected, logits)


@settings(deadline=None, max_examples=300)
@given(SAMPLED)
def test_each_token_owns_the_stretch_that_its_probability_says(case: tuple) -> None:
    """At both ends of each kept token's stretch of [0, 1) it is drawn: the whole distribution is equal."""
    kwargs, logits, eos = case
    expected = kept(edited(logits, make_sequence(**kwargs), eos), kwargs["params"])
    assume(expected.margin > 1e-9)
    points, tokens, start = [], [], 0.0
    for token, prob in zip(expected.ids, expected.probs, strict=True):
        if prob > 1e-9:
            points += [start + 1e-3 * prob, start + (1 - 1e-3) * prob]
            tokens += [token, token]
        start += prob
    rows = [make_sequence(**kwargs, uniform=point) for point in points]
    got = sample(torch.tensor(logits).repeat(len(rows), 1), rows, eos)
    assert [t.token_id for t in got] == tokens
    assert all(seq.rng.draws == 1 for seq in rows)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(ANY, st.floats(0, 1, exclude_max=True)), min_size=1, max_size=6))
def test_mixed_batch_equals_the_reference_row_by_row(batch: list) -> None:
    """Greedy and sampled rows, each with its own parameters; only sampled rows use their generator."""
    eos = batch[0][0][2]
    rows = [make_sequence(**kwargs, uniform=point) for (kwargs, _, _), point in batch]
    logits = np.stack([logits for (_, logits, _), _ in batch])
    before = logits.copy()
    got = sample(torch.from_numpy(logits), rows, eos)
    for seq, token, row, (_, point) in zip(rows, got, logits, batch, strict=True):
        x = edited(row, seq, eos)
        if seq.params.greedy:
            assert token.token_id == int(np.argmax(x))
            assert seq.rng.draws == 0
            continue
        expected = kept(x, seq.params)
        ends = np.cumsum(expected.probs)
        assume(expected.margin > 1e-9 and np.abs(ends[:-1] - point).min(initial=1.0) > 1e-9)
        assert token.token_id == expected.token(point)
        assert seq.rng.draws == 1
    np.testing.assert_array_equal(logits, before)


WIDE = 3000


@pytest.mark.parametrize("decimals", [0, 1, 8], ids=["many ties", "some ties", "no ties"])
@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0], ids=["flat", "middling", "peaked"])
@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 50, "top_p": 0.893},
        {"top_k": 1},
        {"top_k": 700},
        {"top_k": 2999},
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"top_p": 0.01},
        {"top_p": 0.9, "min_p": 0.001},
        {"top_p": 0.3, "min_p": 0.5},
        {"min_p": 0.1},
        {},
    ],
    ids=str,
)
def test_wide_vocabulary(fields: dict, spread: float, decimals: int) -> None:
    """Where only some candidates are sorted, the token is the one that a full sort gives, ties or not."""
    p = SamplingParams(**fields)
    rng = np.random.default_rng(5)
    logits = np.round(rng.normal(size=WIDE) * spread, decimals)
    expected = kept(logits, p)
    assert expected.margin > 1e-9
    points = [*rng.random(30), 1e-9, 1 - 1e-9]
    rows = [make_sequence(p, uniform=float(point)) for point in points]
    got = [t.token_id for t in sample(torch.from_numpy(logits).repeat(len(rows), 1), rows, frozenset())]
    assert got == [expected.token(point) for point in points]


@pytest.mark.parametrize("guess", [1, 8, 100])
def test_number_of_candidates_changes_nothing(guess: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many candidates are looked at first, a row's token is the same."""
    rng = np.random.default_rng(11)
    logits = torch.from_numpy(np.round(rng.normal(size=(40, 500)) * 2, 1)).float()
    fields = [
        {"top_p": 0.7},
        {"top_k": 9},
        {"top_k": 60, "min_p": 0.05},
        {"top_p": 0.4, "min_p": 0.3},
        {"top_p": 0.9, "allowed_token_ids": [3, 200, 499]},
    ]
    rows = [
        make_sequence(SamplingParams(**fields[i % 5]), uniform=float(u)) for i, u in enumerate(rng.random(40))
    ]
    full = [t.token_id for t in sample(logits, rows, frozenset())]
    monkeypatch.setattr("common.sampling.draw.NUCLEUS_GUESS", guess)
    monkeypatch.setattr("common.sampling.draw.TIES", 0)
    assert [t.token_id for t in sample(logits, rows, frozenset())] == full


def test_a_field_that_is_off_leaves_the_row_alone() -> None:
    """A default request's row is not edited; each editing field alone is noticed."""
    default = make_sequence(SamplingParams(), output=(1,))
    assert not needs_edits(default)
    for change in [
        {"allowed_token_ids": [1]},
        {"logit_bias": {1: 1.0}},
        {"repetition_penalty": 1.1},
        {"frequency_penalty": 0.1},
        {"presence_penalty": -0.1},
        {"min_tokens": 2},
    ]:
        assert needs_edits(make_sequence(dataclasses.replace(default.params, **change), output=(1,)))
    assert needs_edits(make_sequence(SamplingParams(), bad_words=((1,),)))
    assert not needs_edits(make_sequence(SamplingParams(min_tokens=1), output=(1,)))
