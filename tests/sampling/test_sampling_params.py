"""What SamplingParams takes, what it refuses, and what the refusal says."""

from __future__ import annotations

import math

import pytest

from common.errors import InvalidValue
from common.sampling_params import SamplingParams

INSIDE = {
    "n": [1, 16384],
    "temperature": [0, 0.0, 1e-6, 1, 2.5, 1e300],
    "top_k": [-1, 0, 1, 10**9, 2**63 - 1],
    "top_p": [math.nextafter(0, 1), 0.5, 1, 1.0],
    "min_p": [0, 0.0, 1, 1.0],
    "presence_penalty": [-2, -2.0, 2, 0.3],
    "frequency_penalty": [-2, 2.0],
    "repetition_penalty": [math.nextafter(0, 1), 1, 1e300],
    "seed": [None, 0, -(2**63), 2**63 - 1],
    "stop": [None, "a", ["a", "b"], ()],
    "stop_token_ids": [None, [0], (5,), {3}],
    "include_stop_str_in_output": [True, False],
    "ignore_eos": [True],
    "max_tokens": [None, 1, 2**63 - 1],
    "min_tokens": [0, 16],
    "logprobs": [None, 0, -1, 2**63 - 1],
    "prompt_logprobs": [None, 0, -1],
    "logit_bias": [None, {}, {0: -100, 1: 100.0}],
    "bad_words": [None, ["x"], ()],
    "allowed_token_ids": [None, [0], range(3)],
    "skip_special_tokens": [False],
}
OUTSIDE = {
    "n": [0, -1, 16385, 1.0, True, "1", None],
    "temperature": [-1e-9, math.nan, math.inf, -math.inf, True, "1", None, 10**400],
    "top_k": [-2, 2**63, 1.0, True, None],
    "top_p": [0, 0.0, -0.1, math.nextafter(1, 2), math.nan, math.inf, True, "x"],
    "min_p": [-1e-9, 1.0000001, math.nan, True, None],
    "presence_penalty": [-2.0001, 2.0001, math.nan, math.inf, False],
    "frequency_penalty": [-2.0001, 2.0001, math.nan, "0"],
    "repetition_penalty": [0, 0.0, -1, math.nan, math.inf, True, 10**400],
    "seed": [2**63, -(2**63) - 1, 1.0, -1.0, True, "7"],
    "stop": ["", [""], ["a", ""], [3], 5, b"a", True],
    "stop_token_ids": [[-1], [1.0], [True], ["1"], "12", 5, [2**63]],
    "include_stop_str_in_output": [1, "yes", None],
    "ignore_eos": [0, "no", None],
    "max_tokens": [0, -1, 1.0, True, 2**63],
    "min_tokens": [-1, 1.0, True, None],
    "logprobs": [-2, 1.0, True, 2**63],
    "prompt_logprobs": [-2, 0.5, False],
    "logit_bias": [{-1: 0.0}, {0: 100.1}, {0: -100.1}, {0: math.nan}, {"0": 1.0}, {True: 1.0}, [1], "a", 5],
    "bad_words": ["word", [""], [1], 5],
    "allowed_token_ids": [[], (), [-1], ["a"], [True], "12", 5],
    "skip_special_tokens": [1, None],
}


def cases(table: dict) -> list:
    """(field, value) pairs, with readable ids."""
    return [pytest.param(f, v, id=f"{f}={v!r}"[:60]) for f, values in table.items() for v in values]


@pytest.mark.parametrize(("field", "value"), cases(INSIDE))
def test_just_inside(field: str, value: object) -> None:
    """The ends of each range are taken."""
    SamplingParams(**{field: value})


@pytest.mark.parametrize(("field", "value"), cases(OUTSIDE))
def test_just_outside(field: str, value: object) -> None:
    """Just beyond, NaN, infinity, booleans and wrong types are refused in one line: field, value, range."""
    with pytest.raises(InvalidValue) as caught:
        SamplingParams(**{field: value})
    message = str(caught.value)
    assert caught.value.field == field
    assert message.startswith(f"{field}: got ")
    assert "allowed: " in message
    assert "\n" not in message


def test_every_field_is_covered() -> None:
    """A new field must come with its range."""
    assert set(INSIDE) == set(OUTSIDE) == set(SamplingParams.__dataclass_fields__)


def test_message_is_for_people() -> None:
    """The whole line, once."""
    with pytest.raises(InvalidValue) as caught:
        SamplingParams(temperature=math.nan)
    assert str(caught.value) == "temperature: got nan, allowed: a finite number of at least 0"


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    """Equal is fine; without a maximum any number is."""
    SamplingParams(min_tokens=5, max_tokens=5)
    SamplingParams(min_tokens=500, max_tokens=None)
    with pytest.raises(InvalidValue, match="min_tokens: got 6, allowed: at most max_tokens=5"):
        SamplingParams(min_tokens=6, max_tokens=5)


def test_caller_cannot_change_it_afterwards() -> None:
    """Lists and dicts are copied in."""
    ids, bias, words = [1], {1: 2.0}, ["a"]
    params = SamplingParams(allowed_token_ids=ids, stop_token_ids=ids, logit_bias=bias, bad_words=words)
    ids.append(2)
    bias[5] = 1.0
    words.append("b")
    assert params.allowed_token_ids == params.stop_token_ids == (1,)
    assert params.logit_bias == {1: 2.0}
    assert params.bad_words == ("a",)


def test_seed_minus_one_means_none() -> None:
    """As in vLLM."""
    assert SamplingParams(seed=-1).seed is None


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (9.9e-6, True), (1e-5, False), (1.0, False)])
def test_where_greedy_begins(temperature: float, greedy: bool) -> None:
    """Below 1e-5."""
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_stop_in_each_form() -> None:
    """One string, several, none."""
    assert SamplingParams(stop="a").stop_strings == ("a",)
    assert SamplingParams(stop=["a", "bc"]).stop_strings == ("a", "bc")
    assert SamplingParams().stop_strings == ()
