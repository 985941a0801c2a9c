"""The output side: text, stop strings, finish reasons, `n` answers; what must be aborted in the engine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidValue
from common.output import OutputProcessor, RequestOutput
from common.protocol import Counters, FinishReason, Logprob, Request, StepOutput
from common.sampling_params import SamplingParams
from common.tokenizer import Tokenizer

END = 0  # <|end|>
STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT


def run(
    tokenizer: Tokenizer | None,
    ids: list[int],
    params: SamplingParams,
    *,
    end: FinishReason | None = None,
    stop_reason: int | None = None,
    group: int = 1,
    stream: bool = True,
) -> tuple[list[RequestOutput], list[tuple[str, int]]]:
    """Play an engine that emits `ids`, `group` per step, ends with `end`, and stops when told to abort."""
    processor = OutputProcessor(tokenizer)
    processor.add(Request("r", (5,), params), stream=stream)
    outputs: list[RequestOutput] = []
    for start in range(0, len(ids), group):
        new = tuple(ids[start : start + group])
        last = start + group >= len(ids)
        step = StepOutput("r", 0, new, end if last else None, stop_reason if last else None)
        changed, to_abort = processor.process([step])
        outputs += changed
        if to_abort:
            late = processor.process([StepOutput("r", 0, (), ABORT), StepOutput("r", 0, (9,), None)])
            assert late == ([], [])  # the engine's last word on it, and a token that should not be
            return outputs, to_abort
    return outputs, []


@pytest.mark.parametrize("group", [1, 2, 9])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("stop", "include", "text"),
    [
        ("DE", False, "ABC"),
        ("DEF", False, "ABC"),
        ("CDX", False, "ABCDEFG"),
        ("DE", True, "ABCDE"),
        ("DEF", True, "ABCDEF"),
    ],
)
def test_a_stop_string_across_tokens(
    pairs: Tokenizer, stop: str, include: bool, text: str, stream: bool, group: int
) -> None:
    """Row B103: nothing of the string is sent before it is decided, and a part that is none comes too."""
    ids = pairs.encode("ABCDEFG")
    assert pairs.convert_ids_to_tokens(ids) == ["AB", "CD", "EF", "G"]
    params = SamplingParams(stop=stop, include_stop_str_in_output=include, max_tokens=4)
    outputs, to_abort = run(pairs, ids, params, end=LENGTH, group=group, stream=stream)
    final = outputs[-1].outputs[0]
    assert outputs[-1].finished
    assert (final.text, "".join(o.outputs[0].delta for o in outputs)) == (text, text)
    matched = stop != "CDX"
    assert (final.finish_reason, final.stop_reason) == (("stop", stop) if matched else ("length", None))
    assert final.token_ids == (ids[:3] if matched else ids)
    assert to_abort == ([("r", 0)] if matched and group == 1 else [])
    if stream and group == 1:
        first = [o.outputs[0].delta for o in outputs[:2]]
        assert first == ["AB", "" if stop == "CDX" else "C"]
    assert stream or len(outputs) == 1


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("stop_id", [None, END])
def test_a_stop_token_cuts_nothing(pairs: Tokenizer, skip: bool, include: bool, stop_id: int | None) -> None:
    """Row B104: the text before an end token is whole, whether or not that token is shown."""
    ids = [*pairs.encode("injury."), END]
    params = SamplingParams(
        stop_token_ids=[END], skip_special_tokens=skip, include_stop_str_in_output=include, max_tokens=99
    )
    outputs, to_abort = run(pairs, ids, params, end=STOP, stop_reason=stop_id)
    final = outputs[-1].outputs[0]
    assert final.text == ("injury.<|end|>" if include and not skip else "injury.")
    assert (final.finish_reason, final.stop_reason, final.token_ids) == ("stop", stop_id, ids)
    assert to_abort == []


@pytest.mark.parametrize(
    ("stop", "ids", "end", "reason"),
    [
        (None, "ABCD", LENGTH, "length"),
        (None, [10, 11, 12, END], STOP, "stop"),
        (None, [10, END], STOP, "stop"),
        ("FG", "ABCDEFG", LENGTH, "stop"),
        ("FG", "ABCD", ABORT, "abort"),
    ],
)
def test_finish_reasons(
    pairs: Tokenizer, stop: str | None, ids: str | list[int], end: FinishReason, reason: str
) -> None:
    """Row B106: max_tokens, EOS as the last token, EOS early, a stop string in the last token, an abort."""
    ids = pairs.encode(ids) if isinstance(ids, str) else ids
    outputs, _ = run(pairs, ids, SamplingParams(stop=stop, max_tokens=4), end=end)
    assert outputs[-1].outputs[0].finish_reason == reason
    assert [o.outputs[0].finish_reason for o in outputs[:-1]] == [None] * (len(ids) - 1)


def test_a_stop_string_that_begins_with_a_space(sentencepiece: Tokenizer) -> None:
    """Row B112: the space in front of a piece counts."""
    ids = sentencepiece.encode("the cats")
    outputs, _ = run(sentencepiece, ids, SamplingParams(stop=" cat", max_tokens=9))
    assert outputs[-1].outputs[0].text == " the"  # the prompt has begun the text, so this space is real


@pytest.mark.parametrize(("min_tokens", "text"), [(0, ""), (1, "AB"), (2, "ABAB")])
def test_min_tokens_puts_stop_strings_off(pairs: Tokenizer, min_tokens: int, text: str) -> None:
    """A string complete within the first `min_tokens` tokens never counts, not even later."""
    outputs, _ = run(pairs, pairs.encode("ABABAB"), SamplingParams(stop="AB", min_tokens=min_tokens))
    assert outputs[-1].outputs[0].text == text
    outputs, _ = run(pairs, pairs.encode("ABCD"), SamplingParams(stop="BC", min_tokens=1))
    assert outputs[-1].outputs[0].text == "A"  # begun in the first token, complete in the second


def test_half_a_character_at_the_end_becomes_a_mark(byte_level: Tokenizer) -> None:
    """The text equals the full decode even when max_tokens cuts a character."""
    half = byte_level.encode("é")[0:1] if len(byte_level.encode("é")) > 1 else [byte_level.encode("ÿ")[0]]
    ids = [*byte_level.encode("cat"), *half]
    for end in (LENGTH, ABORT):
        outputs, _ = run(byte_level, ids, SamplingParams(), end=end)
        assert outputs[-1].outputs[0].text == byte_level.hf.decode(ids) == "cat\ufffd"


@given(data=st.data(), stops=st.lists(st.text("the ca世", min_size=1, max_size=4), max_size=2))
def test_any_tokens_and_stop_strings_equal_a_search_of_the_full_decode(
    byte_level: Tokenizer, data: st.DataObject, stops: list[str]
) -> None:
    """Against the plainest reference: decode everything so far at each token, then look through all of it."""
    ids = data.draw(
        st.lists(st.sampled_from([*byte_level.encode("the cat 世 at. catch"), 7, 200]), min_size=1)
    )
    want, kept = byte_level.hf.decode(ids), ids
    for k in range(1, len(ids) + 1):
        so_far = byte_level.hf.decode(ids[:k])
        ends = [(so_far.find(s) + len(s), -len(s)) for s in stops if s in so_far]
        if ends:
            end, minus_length = min(ends)
            want, kept = so_far[: end + minus_length], ids[:k]
            break
    outputs, _ = run(byte_level, ids, SamplingParams(stop=stops, max_tokens=999), end=LENGTH)
    final = outputs[-1].outputs[0]
    assert (final.text, final.token_ids) == (want, kept)
    text = ""
    for output in outputs:
        text += output.outputs[0].delta
        assert output.outputs[0].text == text
        assert want.startswith(text)


def test_answers_of_one_request_end_at_different_steps(pairs: Tokenizer) -> None:
    """Row B31: n=3, ends after 2, 5 and 8 tokens: index order, none mixed or lost, finished with the last."""
    texts = {0: "AB", 1: "ABCDE", 2: "GGGGGGGG"}
    tokens = {0: [*pairs.encode("A"), *pairs.encode("B")], 1: [pairs.encode(c)[0] for c in texts[1]],
              2: [pairs.encode(c)[0] for c in texts[2]]}  # fmt: skip
    processor = OutputProcessor(pairs)
    processor.add(Request("r", (5,), SamplingParams(n=3)), prompt="x")
    joined = ["", "", ""]
    for step in range(8):
        outs = [
            StepOutput("r", i, (ids[step],), LENGTH if step + 1 == len(ids) else None)
            for i, ids in reversed(tokens.items())
            if step < len(ids)
        ]
        [output], to_abort = processor.process(outs)
        assert [o.index for o in output.outputs] == [0, 1, 2]
        joined = [text + o.delta for text, o in zip(joined, output.outputs, strict=True)]
        assert output.finished == (step == 7)
        assert to_abort == []
    assert joined == [o.text for o in output.outputs] == list(texts.values())
    assert output.prompt == "x"
    assert "r" not in processor


def test_an_abort_reaches_every_answer(pairs: Tokenizer) -> None:
    """Row B31: abort after 3 tokens, one answer being done; state is gone and nothing follows."""
    processor = OutputProcessor(pairs)
    processor.add(Request("r", (5,), SamplingParams(n=3, stop="CDX")))
    ab, cd = pairs.encode("ABCD")
    processor.process(
        [
            StepOutput("r", 1, (ab,), LENGTH, counters=Counters(forwards=1)),
            StepOutput("r", 0, (ab, cd), counters=Counters(forwards=2)),
            StepOutput("r", 2, (ab,), counters=Counters(forwards=3)),
        ]
    )
    output = processor.abort("r")
    assert output is not None
    assert [(o.text, o.finish_reason) for o in output.outputs] == [
        ("ABCD", "abort"), ("AB", "length"), ("AB", "abort")]  # fmt: skip
    assert output.finished
    assert output.counters.forwards == 6
    assert "r" not in processor
    assert processor.abort("r") is None
    assert processor.process([StepOutput("r", 0, (cd,))]) == ([], [])
    processor.add(Request("r", (5,), SamplingParams()))  # the id may be used again


def test_nothing_follows_an_end(pairs: Tokenizer) -> None:
    """Row B31: words on an ended answer are late while another still runs; they change nothing."""
    processor = OutputProcessor(pairs)
    processor.add(Request("r", (5,), SamplingParams(n=2, stop="B")))
    ab, cd = pairs.encode("ABCD")
    _, to_abort = processor.process([StepOutput("r", 0, (ab,))])
    assert to_abort == [("r", 0)]
    assert processor.process([StepOutput("r", 0, (cd,)), StepOutput("r", 0, (), ABORT)]) == ([], [])
    [output], _ = processor.process([StepOutput("r", 1, (cd,), LENGTH)])
    assert [(o.text, o.finish_reason) for o in output.outputs] == [("A", "stop"), ("CD", "length")]


@pytest.mark.parametrize("stream", [True, False])
def test_the_end_comes_first(pairs: Tokenizer, stream: bool) -> None:
    """Row B115: the first token is EOS: empty text, reason stop, a final output; n=2, the other goes on."""
    processor = OutputProcessor(pairs)
    processor.add(Request("r", (5,), SamplingParams(n=2)), stream=stream)
    changed, _ = processor.process([StepOutput("r", 0, (END,), STOP), StepOutput("r", 1, (10,))])
    assert [o.finished for o in changed] == ([False] if stream else [])
    [output], _ = processor.process([StepOutput("r", 1, (END,), STOP)])
    assert output.finished
    first, second = output.outputs
    assert (first.text, first.token_ids, first.finish_reason, first.delta) == ("", [END], "stop", "")
    assert (second.text, second.finish_reason) == (pairs.decode([10]), "stop")


def test_log_probabilities_follow_their_tokens(pairs: Tokenizer) -> None:
    """One mapping per kept token, the sum over the chosen ones; a stop string drops the rest."""
    ids = pairs.encode("ABCDEFG")
    rows = tuple({i: Logprob(-0.5 * k, 1), 7: Logprob(-9.0, 2)} for k, i in enumerate(ids, start=1))
    processor = OutputProcessor(pairs)
    processor.add(Request("r", (5, 6), SamplingParams(logprobs=1, prompt_logprobs=0, stop="DE")))
    prompt_rows = (None, {6: Logprob(-2.0, 3)})
    step = StepOutput(
        "r", 0, tuple(ids), logprobs=rows, prompt_logprobs=prompt_rows, counters=Counters(cached_tokens=1)
    )
    [output], to_abort = processor.process([step])
    answer = output.outputs[0]
    assert answer.logprobs == list(rows[:3])
    assert answer.cumulative_logprob == pytest.approx(-0.5 - 1.0 - 1.5)
    assert output.prompt_logprobs == list(prompt_rows)
    assert output.num_cached_tokens == 1
    assert to_abort == [("r", 0)]


def test_outputs_are_snapshots(pairs: Tokenizer) -> None:
    """A stream that is read late must not see later tokens."""
    processor = OutputProcessor(pairs)
    processor.add(Request("r", (5,), SamplingParams()))
    [early], _ = processor.process([StepOutput("r", 0, (10,))])
    processor.process([StepOutput("r", 0, (11,))])
    assert early.outputs[0].token_ids == [10]


def test_without_a_tokenizer_there_is_no_text() -> None:
    outputs, _ = run(None, [4, 5], SamplingParams(), end=LENGTH)
    assert [(o.outputs[0].text, o.outputs[0].token_ids) for o in outputs] == [("", [4]), ("", [4, 5])]
    with pytest.raises(InvalidValue, match=r"stop: got \('x',\), allowed: no stop strings"):
        OutputProcessor(None).add(Request("r", (5,), SamplingParams(stop="x")))


def test_a_live_id_is_refused(pairs: Tokenizer) -> None:
    processor = OutputProcessor(pairs)
    processor.add(Request("r", (5,), SamplingParams()))
    with pytest.raises(InvalidValue, match="request_id"):
        processor.add(Request("r", (5,), SamplingParams()))
