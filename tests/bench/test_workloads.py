"""Traces: the same everywhere, with the lengths that they claim."""

from statistics import fmean

import pytest

from common.bench.workloads import WORKLOADS, client_bound, make_trace, trace_hash
from common.errors import InvalidValue


def lengths(name: str, count: int, **options) -> list[tuple[int, int]]:
    trace = make_trace(name, count, vocab_size=49152, **options)
    return [(len(item.prompt_token_ids), item.output_len) for item in trace]


def test_uniform_is_nano_vllms_workload() -> None:
    """Its published total: 133,966 output tokens over 256 requests with seed 0."""
    found = lengths("uniform", 256)
    assert sum(output for _, output in found) == 133_966
    assert all(100 <= n <= 1024 for pair in found for n in pair)


def test_sharegpt_holds_every_real_turn_once() -> None:
    found = lengths("sharegpt", 2000)
    assert fmean(prompt for prompt, _ in found) == pytest.approx(105.978)
    assert fmean(output for _, output in found) == pytest.approx(297.964)
    assert (47, 326) in found
    assert all(prompt + output <= 2048 for prompt, output in found)
    again = lengths("sharegpt", 2003)
    assert again[2000:] == again[:3]


def test_sharegpt_paper_has_the_papers_means() -> None:
    """161.31 in, 337.99 out; a sample of 20,000 comes within three percent."""
    found = lengths("sharegpt-paper", 20_000)
    assert fmean(prompt for prompt, _ in found) == pytest.approx(161.31, rel=0.03)
    assert fmean(output for _, output in found) == pytest.approx(337.99, rel=0.03)
    assert max(prompt + output for prompt, output in found) == 2048
    assert min(min(pair) for pair in found) >= 1


@pytest.mark.parametrize("name", WORKLOADS)
def test_same_seed_same_trace(name: str) -> None:
    def digest(**options) -> str:
        return trace_hash(make_trace(name, 5, **({"vocab_size": 500} | options)))

    assert digest() == digest()
    assert digest() != digest(seed=1)
    assert digest() == digest(bound="context"), "what a client asks for is no work"


def test_hash_is_of_content() -> None:
    """A change of the format or of the generator would silently make old and new figures incomparable."""
    expected = "70583a054769782dfea6914ea216e39fdd2cb2825140d0fd7bfd4651e47b89bc"
    assert trace_hash(make_trace("sharegpt", 3, vocab_size=49152)) == expected


def test_ids_keep_away_from_special_tokens() -> None:
    ids = {token for item in make_trace("sharegpt", 50, vocab_size=49152) for token in item.prompt_token_ids}
    assert min(ids) >= 1000
    assert max(ids) < 48152


@pytest.mark.parametrize(
    ("bound", "output_len", "room", "expected"),
    [
        ("exact", 100, 2000, 100),
        ("pow2", 100, 2000, 128),
        ("pow2", 128, 2000, 128),
        ("pow2", 1, 2000, 1),
        ("pow2", 1500, 1900, 1900),
        ("context", 100, 2000, 2000),
    ],
)
def test_what_a_client_asks_for(bound, output_len, room, expected) -> None:
    assert client_bound(bound, output_len, room) == expected


@pytest.mark.parametrize("bound", ["exact", "pow2", "context"])
def test_requests_fit_the_context(bound) -> None:
    for item in make_trace("uniform", 40, vocab_size=500, bound=bound, max_model_len=300):
        assert 1 <= item.output_len <= item.max_tokens
        assert len(item.prompt_token_ids) + item.max_tokens <= 300


def test_longest_cuts_both() -> None:
    assert all(max(pair) <= 32 for pair in lengths("sharegpt", 50, longest=32))


@pytest.mark.parametrize(
    ("arguments", "field"), [({"name": "nothing"}, "workload"), ({"num_requests": 0}, "num_requests")]
)
def test_refusals(arguments, field) -> None:
    with pytest.raises(InvalidValue) as error:
        make_trace(**({"name": "sharegpt", "num_requests": 3, "vocab_size": 500} | arguments))
    assert error.value.field == field
