"""Incremental text equals the full decode, whatever the tokens and however they arrive."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.detokenizer import LONGEST_RUN, MARK, IncrementalDetokenizer
from common.tokenizer import Tokenizer

Decode = Callable[..., str]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def deltas_of(tokenizer: Tokenizer, groups: list[list[int]], prompt: list[int], skip: bool) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    deltas = []
    for group in groups:
        deltas.append(detokenizer.append(group))
        assert detokenizer.text == "".join(deltas)
    return [*deltas, detokenizer.flush()]


def bytes_as_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token for each byte, in either kind of vocabulary."""
    table = {tokenizer.token_bytes(i) if tokenizer.byte_level else tokenizer.fallback_byte(i): i
             for i in range(len(tokenizer))}  # fmt: skip
    return [table[bytes([b]) if tokenizer.byte_level else b] for b in data]


@given(data=st.data(), text=TEXTS, prompt=st.sampled_from(["", "the cat", " ", "世"]), skip=st.booleans())
def test_text_in_any_grouping_equals_the_full_decode(
    any_tokenizer: Tokenizer, full_decode: Decode, data: st.DataObject, text: str, prompt: str, skip: bool
) -> None:
    """One by one and in random groups: the deltas joined are the full decode, no half character in them."""
    head, ids = any_tokenizer.encode(prompt), any_tokenizer.encode(text)
    want = full_decode(any_tokenizer, head + ids, skip)[len(full_decode(any_tokenizer, head, skip)) :]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    groups = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    for way in ([[i] for i in ids], groups):
        deltas = deltas_of(any_tokenizer, way, head, skip)
        assert "".join(deltas) == want
        assert MARK in text or MARK not in "".join(deltas)


@settings(max_examples=200)
@given(data=st.data(), prompt=st.sampled_from(["", "the cat"]), skip=st.booleans())
def test_any_ids_at_all_equal_the_full_decode(
    any_tokenizer: Tokenizer, full_decode: Decode, data: st.DataObject, prompt: str, skip: bool
) -> None:
    """Garbage as a random model makes it: lone bytes, special tokens, ids beyond the vocabulary (row B82)."""
    ids = data.draw(st.lists(st.integers(0, len(any_tokenizer) + 20), max_size=LONGEST_RUN - 1))
    head = any_tokenizer.encode(prompt)
    want = full_decode(any_tokenizer, head + ids, skip)[len(full_decode(any_tokenizer, head, skip)) :]
    assert "".join(deltas_of(any_tokenizer, [[i] for i in ids], head, skip)) == want


@given(data=st.binary(max_size=24))
def test_any_bytes_equal_the_full_decode(byte_level: Tokenizer, full_decode: Decode, data: bytes) -> None:
    ids = bytes_as_ids(byte_level, data)
    text = "".join(deltas_of(byte_level, [[i] for i in ids], [], True))
    assert text == full_decode(byte_level, ids) == data.decode(errors="replace")


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_a_character_is_sent_when_it_is_whole(name: str, request: pytest.FixtureRequest) -> None:
    """Row B107, bytes one by one: nothing for the first three of an emoji, then all of it."""
    tokenizer = request.getfixturevalue(name)
    ids = bytes_as_ids(tokenizer, "🙂".encode())
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.append([i]) for i in ids[:3]] == ["", "", ""]
    assert detokenizer.append([ids[3]]) + detokenizer.flush() == "🙂"


def test_half_a_character_at_the_end_is_one_mark(byte_level: Tokenizer, full_decode: Decode) -> None:
    ids = byte_level.encode("cat") + bytes_as_ids(byte_level, "🙂".encode())[:3]
    assert deltas_of(byte_level, [ids], [], True) == ["cat", MARK]
    assert full_decode(byte_level, ids) == "cat" + MARK


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_a_character_that_the_prompt_began_comes_whole(name: str, request: pytest.FixtureRequest) -> None:
    """The cut may fall inside a character; its end alone would be marks."""
    tokenizer = request.getfixturevalue(name)
    for cut in (1, 2):
        ids = bytes_as_ids(tokenizer, "世".encode())
        prompt = tokenizer.encode("cat") + ids[:cut]
        assert "".join(deltas_of(tokenizer, [[i] for i in ids[cut:]], prompt, True)) == "世"


def test_sent_text_never_moves_back(byte_level: Tokenizer) -> None:
    """Row B109: an incomplete character that turns out to be none must not be counted as sent."""
    steps = ["A 世".encode() + b"\xe4", b"a", b"b", b"\xe4", b"b"]
    detokenizer = IncrementalDetokenizer(byte_level)
    seen = []
    for step in steps:
        detokenizer.append(bytes_as_ids(byte_level, step))
        seen.append(detokenizer.text)
    assert seen == ["A 世", "A 世\ufffda", "A 世\ufffdab", "A 世\ufffdab", "A 世\ufffdab\ufffdb"]


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_bytes_that_are_no_character_do_not_wait(
    name: str, request: pytest.FixtureRequest, full_decode: Decode
) -> None:
    """Row B110, tiny: each of 50 lone continuation bytes is sent at once, and so is the word after them."""
    tokenizer = request.getfixturevalue(name)
    ids = bytes_as_ids(tokenizer, b"\x85" * 50) + tokenizer.encode("the")
    detokenizer = IncrementalDetokenizer(tokenizer, tokenizer.encode("cat"))
    assert [detokenizer.append([i]) for i in ids[:50]] == [MARK] * 50
    assert detokenizer.append(ids[50:]).strip() == "the"
    assert detokenizer.text == full_decode(tokenizer, tokenizer.encode("cat") + ids)[len("cat") :]


def test_a_real_replacement_character_is_text(any_tokenizer: Tokenizer, byte_level: Tokenizer) -> None:
    """Row B110: the mark itself, well encoded, holds nothing up."""
    detokenizer = IncrementalDetokenizer(byte_level)
    assert detokenizer.append(byte_level.encode(MARK)) == MARK
    assert detokenizer.append(byte_level.encode("ok")) == "ok"


def test_a_long_run_of_byte_tokens_is_sent_in_parts(sentencepiece: Tokenizer) -> None:
    """The wait for the end of a run of byte tokens has a bound."""
    detokenizer = IncrementalDetokenizer(sentencepiece)
    text = "नमस्ते" * 10
    waiting = longest = 0
    for token_id in bytes_as_ids(sentencepiece, text.encode()):
        waiting = 0 if detokenizer.append([token_id]) else waiting + 1
        longest = max(longest, waiting)
    assert LONGEST_RUN - 1 <= longest <= LONGEST_RUN + 2
    assert detokenizer.text + detokenizer.flush() == text


@pytest.mark.parametrize("name", ["sentencepiece", "metaspace"])
def test_spaces_in_front_of_pieces(name: str, request: pytest.FixtureRequest, full_decode: Decode) -> None:
    """Row B112: joined deltas = decode(prompt + output) - decode(prompt); " cat" alone loses its space."""
    tokenizer = request.getfixturevalue(name)
    prompt, ids = tokenizer.encode("the dog"), tokenizer.encode("the cat")
    ids += tokenizer.hf.convert_tokens_to_ids(["s"])
    assert [tokenizer.decode([i]) for i in ids] == ["the", "cat", "s"]
    want = full_decode(tokenizer, prompt + ids)[len(full_decode(tokenizer, prompt)) :]
    assert "".join(deltas_of(tokenizer, [[i] for i in ids], prompt, True)) == want == " the cats"
    assert "".join(deltas_of(tokenizer, [[i] for i in ids], [], True)) == "the cats"
    only_specials = tokenizer.hf.convert_tokens_to_ids(["<|start|>"])
    assert "".join(deltas_of(tokenizer, [ids], only_specials, True)) == "the cats"
    assert "".join(deltas_of(tokenizer, [ids], only_specials, False)) == " the cats"


def test_special_tokens_are_skipped_or_kept(any_tokenizer: Tokenizer) -> None:
    ids = [*any_tokenizer.encode("the"), *any_tokenizer.hf.convert_tokens_to_ids(["<|end|>"])]
    assert "".join(deltas_of(any_tokenizer, [ids], [], True)) == "the"
    assert "".join(deltas_of(any_tokenizer, [ids], [], False)) == "the<|end|>"


def test_added_tokens_are_text(byte_level: Tokenizer, full_decode: Decode) -> None:
    """Also one that is spelled with characters that no byte stands for."""
    ids = byte_level.encode("the<tool>cat<世>")
    assert set(byte_level.hf.convert_tokens_to_ids(["<tool>", "<世>"])) <= set(ids)
    assert (
        "".join(deltas_of(byte_level, [ids], [], True)) == full_decode(byte_level, ids) == "the<tool>cat<世>"
    )


@pytest.mark.timing
@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("filler", ["words", "lone bytes", "runs of bytes"])
def test_time_is_linear(name: str, filler: str, request: pytest.FixtureRequest) -> None:
    """Row B110: four times the tokens take about four times the time, not sixteen; bad bytes or good ones."""
    tokenizer = request.getfixturevalue(name)
    ids = {
        "words": tokenizer.encode("the cat, the dog"),
        "lone bytes": bytes_as_ids(tokenizer, b"\x85"),
        "runs of bytes": bytes_as_ids(tokenizer, "世".encode()),
    }[filler]

    def seconds(count: int) -> float:
        detokenizer = IncrementalDetokenizer(tokenizer)
        stream = [[ids[i % len(ids)]] for i in range(count)]
        start = perf_counter()
        for new in stream:
            detokenizer.append(new)
        return perf_counter() - start

    seconds(100)
    few, many = (min(seconds(count) for _ in range(5)) for count in (2_000, 8_000))
    assert many < 9 * few
