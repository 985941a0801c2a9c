"""Beam search without an engine: which candidates go on, which are kept, when it is over."""

from __future__ import annotations

import pytest

from common.beam_params import BeamSearchParams
from common.errors import InvalidValue
from common.protocol import Counters, FinishReason, Logprob, Request
from stage5_prefix_sharing.beam import BeamSearch

EOS = 2


def search(width: int, max_tokens: int = 20, eos=(EOS,), **fields) -> BeamSearch:
    """A search for a model with these end-of-sequence ids."""
    return BeamSearch(BeamSearchParams(width, **fields), eos, max_tokens)


def step(beams: BeamSearch, *rows: dict[int, float]) -> list[tuple[int, int]]:
    """One step, from a mapping of token to log probability for each live beam."""
    return beams.step([{token: Logprob(logprob, 1) for token, logprob in row.items()} for row in rows])


def pool(beams: BeamSearch) -> list[tuple[tuple[int, ...], float]]:
    """Finished answers with their scores."""
    return [(beam.token_ids, pytest.approx(beams.score(beam))) for beam in beams.pool]


def test_the_best_of_all_beams_together_go_on():
    """B38: the parent is the beam whose candidate it is, whatever its rank; equals by parent, then by id."""
    beams = search(3)
    assert step(beams, {10: -1.0, 11: -2.0, 12: -3.0, 13: -4.0}) == [(0, 10), (0, 11), (0, 12)]
    assert step(beams, {20: -5.0, 21: -6.0}, {20: -0.5, 21: -1.0}, {20: -0.1, 21: -9.0}) == [
        (1, 20),
        (1, 21),
        (2, 20),
    ]
    assert [beam.token_ids for beam in beams.live] == [(11, 20), (11, 21), (12, 20)]
    assert [beam.logprob for beam in beams.live] == pytest.approx([-2.5, -3.0, -3.1])
    ties = search(2)
    step(ties, {10: -1.0, 11: -1.0, 12: -1.0})
    assert step(ties, {31: -1.0, 30: -1.0}, {29: -1.0, 28: -1.0}) == [(0, 30), (0, 31)]


def test_how_many_candidates_are_needed():
    """B38: (1 + ending ids) x width, and never fewer than 2 x width (as transformers takes)."""
    assert search(4, eos=()).num_candidates == 8
    assert search(4).num_candidates == 8
    assert search(4, eos=(2, 7)).num_candidates == 12
    assert search(4, eos=(2, 7), ignore_eos=True).num_candidates == 8
    assert search(4, eos=(2, 7), stop_token_ids=[7, 9, 11]).num_candidates == 20


@pytest.mark.parametrize("num_ends", [8, 5])
def test_live_beams_are_refilled_when_many_end(num_ends):
    """B38: of the best 8 candidates all, or 5, are EOS ids; 4 live beams go on, at most 4 are finished."""
    beams = search(4, eos=(2, 7), max_tokens=6)
    step(beams, {token: -1.0 - 0.01 * token for token in range(10, 22)})
    rows = [{2: -0.1, 7: -0.105, 30: -3.0, 31: -4.0} for _ in range(4)]
    if num_ends == 5:
        rows[2], rows[3] = {2: -0.3, 30: -0.25, 31: -0.26, 32: -0.4}, {30: -0.5, 31: -0.6, 32: -0.7}
    chosen = step(beams, *rows)
    assert len(beams.pool) == 4
    assert {beam.token_ids[-1] for beam in beams.pool} == {2, 7}
    assert len(beams.live) == len(chosen) == 4
    assert [beam.token_ids for beam in beams.live] == [(10 + parent, token) for parent, token in chosen]
    assert not {token for _, token in chosen} & {2, 7}
    assert chosen == ([(p, 30) for p in range(4)] if num_ends == 8 else [(2, 30), (2, 31), (2, 32), (3, 30)])
    while len(beams.live[0].token_ids) < 5:
        step(beams, *({2: -0.1, 7: -0.2, 30: -0.3, 31: -0.4} for _ in range(4)))
        assert len(beams.pool) == len(beams.live) == 4


def test_an_end_beyond_the_first_is_dropped():
    """Only the `beam_width` best candidates can finish; the others are there to refill the live beams."""
    beams = search(2)
    assert step(beams, {10: -1.0, 11: -1.1, EOS: -1.2, 12: -1.3}) == [(0, 10), (0, 11)]
    assert beams.pool == []


def test_the_pool_keeps_the_best():
    """A later and better answer drives out the worst one; of equals the older one stays."""
    beams = search(2, early_stopping="never")
    step(beams, {EOS: -3.0, 10: -3.1, 11: -3.2})
    step(beams, {EOS: -3.0, 20: -4.0}, {20: -4.0, 21: -4.1})
    assert pool(beams) == [((EOS,), -3.0), ((10, EOS), -3.05)]
    assert not beams.done
    step(beams, {EOS: -1.9, 30: -2.0}, {30: -5.0, 31: -5.0})
    assert pool(beams) == [((EOS,), -3.0), ((10, 20, EOS), -3.0)]


def after_five_steps(**fields) -> BeamSearch:
    """Width 2: finished -4 after 4 tokens, better -4.9 after 5; the best live beam is -6 after 5 tokens."""
    beams = search(2, **fields)
    step(beams, {10: -1.0, 11: -1.3})
    step(beams, {12: -1.0}, {13: -1.0})
    step(beams, {12: -1.0}, {13: -1.0})
    step(beams, {EOS: -1.0, 14: -1.2}, {14: -1.0})
    assert not beams.done
    assert len(beams.pool) == 1
    step(beams, {EOS: -0.7, 15: -1.8}, {15: -2.2})
    assert [beam.logprob for beam in beams.live] == pytest.approx([-6.0, -6.5])
    assert sorted(beam.logprob for beam in beams.pool) == pytest.approx([-4.9, -4.0])
    return beams


@pytest.mark.parametrize(
    ("penalty", "early_stopping", "done"),
    [
        (1.0, False, True),  # -6 / 5 = -1.2, the worst finished -1.0
        (1.0, "never", False),  # -6 / 20 = -0.3 could still come
        (1.0, True, True),
        (0.0, False, True),  # -6 and -4.9
        (0.0, "never", True),
        (-1.0, False, True),  # -6 x 5 = -30 and -4.9 x 5
        (-1.0, "never", True),  # longer would only be worse
    ],
)
def test_best_score_still_reachable(penalty, early_stopping, done):
    """B35: the bound depends on the sign of the penalty, and on the present or the largest length."""
    assert after_five_steps(length_penalty=penalty, early_stopping=early_stopping).done is done


def test_both_beams_end():
    """B37: width 2 ends after step 2 with 2 finished beams; width 1 after step 1 with 1."""
    beams = search(2, early_stopping=True)
    step(beams, {10: -1.0, 11: -1.1, 12: -9.0})
    step(beams, {EOS: -0.1, 12: -5.0}, {EOS: -0.2, 12: -5.0})
    assert beams.done
    assert pool(beams) == [((10, EOS), -0.55), ((11, EOS), -0.65)]
    alone = search(1, early_stopping=True)
    step(alone, {EOS: -0.1, 10: -3.0})
    assert alone.done
    assert pool(alone) == [((EOS,), -0.1)]


def test_stop_ids_end_a_beam():
    """B37: a stop id is an end like EOS, under `ignore_eos` too, and is named as the reason."""
    beams = search(2, early_stopping=True, ignore_eos=True, stop_token_ids=[12])
    assert step(beams, {EOS: -0.1, 12: -0.2, 10: -3.0, 11: -4.0}) == [(0, EOS), (0, 10)]
    assert pool(beams) == [((12,), -0.2)]
    step(beams, {12: -0.1, 10: -9.0}, {10: -9.0, 11: -9.1})
    assert beams.done
    request = Request("a", (1,), beams.params.sampling_params(), beam=beams.params)
    [best] = beams.answers(request, Counters())
    assert (best.new_token_ids, best.finish_reason, best.stop_reason) == ((EOS, 12), FinishReason.STOP, 12)


def test_without_an_end_it_runs_to_max_tokens():
    """B37: `ignore_eos` goes through EOS to the last step, where the best candidates are all finished."""
    beams = search(2, max_tokens=3, ignore_eos=True, n=2)
    for _ in range(2):
        step(beams, *({EOS: -0.1, 10: -0.3} for _ in beams.live))
        assert not beams.done
    step(beams, *({EOS: -0.1, 10: -0.3} for _ in beams.live))
    assert beams.done
    assert beams.live == []
    assert pool(beams) == [((EOS, EOS, EOS), -0.1), ((EOS, EOS, 10), -0.5 / 3)]


def test_answers_say_what_each_is():
    """Index by order of score, all tokens with their log probabilities, the search's cost once."""
    beams = search(2, max_tokens=2, n=2, length_penalty=0.0)
    step(beams, {10: -1.0, EOS: -1.5, 11: -2.0, 12: -3.0})
    step(beams, {13: -1.0, 14: -2.0}, {13: -1.0, 14: -2.0})
    request = Request("a", (1, 1, 1), beams.params.sampling_params(), beam=beams.params)
    cost = Counters(prompt_tokens=3, forwards=5, tokens_computed=8)
    first, second = beams.answers(request, cost)
    assert (first.index, first.new_token_ids, first.finish_reason) == (0, (EOS,), FinishReason.STOP)
    assert first.stop_reason is None
    assert (second.index, second.new_token_ids, second.finish_reason) == (1, (10, 13), FinishReason.LENGTH)
    assert second.logprobs == ({10: Logprob(-1.0, 1)}, {13: Logprob(-1.0, 1)})
    assert first.counters == Counters(prompt_tokens=3, output_tokens=1, forwards=5, tokens_computed=8)
    assert second.counters == Counters(prompt_tokens=3, output_tokens=2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("beam_width", 0),
        ("beam_width", 2.0),
        ("beam_width", True),
        ("n", 0),
        ("n", 5),
        ("n", True),
        ("max_tokens", 0),
        ("length_penalty", float("nan")),
        ("length_penalty", 10.5),
        ("length_penalty", "1"),
        ("early_stopping", "sometimes"),
        ("early_stopping", None),
        ("early_stopping", 1),
        ("ignore_eos", 1),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", "12"),
        ("include_stop_str_in_output", "yes"),
        ("skip_special_tokens", None),
    ],
)
def test_bad_parameters_are_refused_by_name(field, value):
    """One line that names the field, the value and the range."""
    with pytest.raises(InvalidValue) as error:
        BeamSearchParams(**({"beam_width": 4} | {field: value}))
    assert error.value.field == field
    assert "\n" not in str(error.value)


def test_parameters_cannot_change_under_us():
    """A list of stop ids is copied."""
    ids = [5, 6]
    params = BeamSearchParams(2, stop_token_ids=ids)
    ids.append(7)
    assert params.stop_token_ids == (5, 6)
    assert params.ends((2, 5)) == {2, 5, 6}
