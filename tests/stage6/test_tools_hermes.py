"""The hermes parser: what is a call and what is text, for every way in which the text may be split."""

from __future__ import annotations

import json
import re
from itertools import groupby

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stage6_api.tool_events import Arguments, CallStart, Text, ToolEvent
from stage6_api.tools_hermes import HermesParser

WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


def joined(events: list[ToolEvent]) -> list[ToolEvent]:
    """Neighbours of one kind as one."""
    out: list[ToolEvent] = []
    for _, group in groupby(events, key=lambda e: (type(e), getattr(e, "index", 0))):
        parts = list(group)
        first = parts[0]
        if isinstance(first, Text):
            out.append(Text("".join(part.text for part in parts)))
        elif isinstance(first, Arguments):
            out.append(Arguments(first.index, "".join(part.text for part in parts)))
        else:
            assert len(parts) == 1, "a call begins once"
            out.append(first)
    return out


def parse(*pieces: str, parallel: bool = True) -> list[ToolEvent]:
    parser = HermesParser(parallel)
    events = [event for piece in pieces for event in parser.push(piece)]
    events += parser.finish()
    assert all(isinstance(event, CallStart) or event.text for event in events), "nothing is sent empty"
    return joined(events)


def call(index: int, name: str, arguments: str) -> list[ToolEvent]:
    return [CallStart(index, name), Arguments(index, arguments)]


CASES: dict[str, tuple[str, list[ToolEvent]]] = {
    "text": ("Hello.\n", [Text("Hello.\n")]),
    "blank text": (" \n", [Text(" \n")]),
    "one": (WEATHER, call(0, "weather", '{"city": "Bern"}')),
    "text around": (
        f"Let me see. {WEATHER}\nDone <b>",
        [Text("Let me see."), *call(0, "weather", '{"city": "Bern"}'), Text("\nDone <b>")],
    ),
    "two": (
        f"{WEATHER}\n{WEATHER}\n",
        call(0, "weather", '{"city": "Bern"}') + call(1, "weather", '{"city": "Bern"}'),
    ),
    "text between": (
        f"{WEATHER} and {WEATHER}",
        [*call(0, "weather", '{"city": "Bern"}'), Text(" and"), *call(1, "weather", '{"city": "Bern"}')],
    ),
    "braces in strings": (
        '<tool_call>{"name": "f", "arguments": {"a": "}{]\\"</tool_call>"}}</tool_call>',
        call(0, "f", '{"a": "}{]\\"</tool_call>"}'),
    ),
    "nested": (
        '<tool_call>{"name": "f", "arguments": {"a": {"b": [{}, [1]]}, "c": null}}</tool_call>',
        call(0, "f", '{"a": {"b": [{}, [1]]}, "c": null}'),
    ),
    "no arguments": ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', call(0, "f", "{}")),
    "arguments left out": ('<tool_call>{"name": "f"}</tool_call>', call(0, "f", "{}")),
    "null arguments": ('<tool_call>{"name": "f", "arguments": null}</tool_call>', call(0, "f", "{}")),
    "parameters": ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', call(0, "f", '{"a": 1}')),
    "arguments first": (
        '<tool_call>{"arguments": {"a": [1]}, "name": "f"}</tool_call>',
        call(0, "f", '{"a": [1]}'),
    ),
    "other keys": (
        '<tool_call>{"id": 7, "name": "f", "arguments": {"a": 1}, "x": [2]}</tool_call>',
        call(0, "f", '{"a": 1}'),
    ),
    "JSON in JSON": (
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        call(0, "f", '{"a": 1}'),
    ),
    "no end marker": ('<tool_call>{"name": "f", "arguments": {"a": 1}}', call(0, "f", '{"a": 1}')),
    "half an end marker": ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool', call(0, "f", '{"a": 1}')),
    "no last brace": ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', call(0, "f", '{"a": 1}')),
    "cut in arguments": ('<tool_call>{"name": "f", "arguments": {"a": "x', call(0, "f", '{"a": "x')),
    "wrong bracket": (
        '<tool_call>{"name": "f", "arguments": {"a": [1}',
        [*call(0, "f", '{"a": [1'), Text("}")],
    ),
}

TEXT_AFTER_ALL = {
    "half a marker": "So <tool_ca",
    "other tags": "<tool><tool_called>",
    "empty": "<tool_call></tool_call>",
    "no JSON": "a <tool_call>weather(Bern)</tool_call> b",
    "a list": "<tool_call>[1]</tool_call>",
    "a string": '<tool_call>"x"</tool_call>',
    "no name": '<tool_call>{"arguments": {}}</tool_call>',
    "empty name": '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    "no string for a name": '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
    "a list of arguments": '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    "bad arguments": '<tool_call>{"name": "f", "arguments": {bad}}</tool_call>',
    "quotes of the wrong kind": "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>",
    "no value": '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>',
    "NaN": '<tool_call>{"arguments": {"a": NaN}, "name": "f"}</tool_call>',
    "half a character": '<tool_call>{"arguments": {}, "name": "\\ud800"}</tool_call>',
    "brackets too deep": '<tool_call>{"arguments": ' + "[" * 3000 + "]" * 3000 + ', "name": "f"}</tool_call>',
    "cut before the call is known": ' \n<tool_call>\n{"name": "f", "argum',
    "mixed brackets": '<tool_call>{"name": "f"]</tool_call>',
    "cut marker after blank space": "a \n <tool",
}


@pytest.mark.parametrize("case", CASES)
def test_calls(case: str) -> None:
    """The whole text in one piece (also vllm#47907)."""
    text, want = CASES[case]
    assert parse(text) == want


@pytest.mark.parametrize("case", TEXT_AFTER_ALL)
def test_what_is_no_call_is_text(case: str) -> None:
    """All of it, exactly."""
    assert parse(TEXT_AFTER_ALL[case]) == [Text(TEXT_AFTER_ALL[case])]


@pytest.mark.parametrize("text", [*(text for text, _ in CASES.values()), *TEXT_AFTER_ALL.values()])
def test_any_two_halves_and_single_characters(text: str) -> None:
    """Every place where a text can be split in two, and all places at once."""
    whole = parse(text)
    assert parse(*text) == whole
    for cut in range(0, len(text), 1 + len(text) // 500):
        assert parse(text[:cut], text[cut:]) == whole


FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    WEATHER,
    '{"name": "f", "arguments": ',
    '{"a": ',
    '"x"',
    "1",
    "}",
    "}}",
    "[",
    "]",
    '"',
    "\\",
    "<",
    " ",
    "\n",
    ",",
    "<tool_",
    "hi",
    "é🙂",
    '"arguments": {}',
    '"name": "g"',
    "{",
]


@given(fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=12), data=st.data())
@example(fragments=["<tool_call>", "<tool_call>", '{"name": "f", "arguments": ', "{", "}}"], data=None)
@settings(max_examples=400, deadline=None)
def test_splits_change_nothing(fragments: list[str], data: st.DataObject | None) -> None:
    """Right or wrong, a text means the same however it comes, and nothing of it is lost."""
    text, pieces, start = "".join(fragments), [], 0
    while data is not None and start < len(text):
        length = data.draw(st.integers(1, len(text) - start))
        pieces.append(text[start : start + length])
        start += length
    for parallel in (True, False):
        whole = parse(text, parallel=parallel)
        assert parse(*(pieces or text), parallel=parallel) == whole
        starts = [event for event in whole if isinstance(event, CallStart)]
        assert [start.index for start in starts] == list(range(len(starts)))
        if not starts:
            assert whole == ([Text(text)] if text else [])


LEAVES = st.none() | st.booleans() | st.integers() | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))
CALLS = st.tuples(st.from_regex(r"[A-Za-z0-9_-]{1,12}", fullmatch=True), st.dictionaries(st.text(), VALUES))


@given(
    st.lists(CALLS, min_size=1, max_size=3),
    st.sampled_from([None, 2]),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_calls_come_back(calls: list[tuple[str, dict]], indent: int | None, ascii_only: bool) -> None:
    """Names and arguments as they were written, whatever is in them."""
    text = "\n".join(
        f"<tool_call>\n{json.dumps(call, indent=indent, ensure_ascii=ascii_only)}\n</tool_call>"
        for call in ({"name": name, "arguments": arguments} for name, arguments in calls)
    )
    events = parse(*text)
    starts = [event.name for event in events if isinstance(event, CallStart)]
    arguments = [json.loads(event.text) for event in events if isinstance(event, Arguments)]
    assert list(zip(starts, arguments, strict=True)) == calls
    assert not any(isinstance(event, Text) for event in events)


def test_arguments_come_while_they_are_written() -> None:
    """The name goes out with the first value, each later character at once."""
    parser = HermesParser()
    assert parser.push('<tool_call>{"name": "f", "arguments": {"a": ') == []
    assert parser.push('"') == [CallStart(0, "f"), Arguments(0, '{"a": "')]
    assert parser.push("x") == [Arguments(0, "x")]
    assert parser.push('y", "b"') == [Arguments(0, 'y", "b"')]
    assert parser.push(": 1}}") == [Arguments(0, ": 1}")]
    assert parser.finish() == []


def test_text_goes_out_at_once() -> None:
    """Only what could begin a call, with the blank space before it, is held back."""
    parser = HermesParser()
    assert parser.push("Hello") == [Text("Hello")]
    assert parser.push(" world \n<to") == [Text(" world")]
    assert parser.push("ken>") == [Text(" \n<token>")]


def test_only_the_first_call_without_parallel_calls() -> None:
    """parallel_tool_calls false: later calls and later text are dropped."""
    assert parse(f"a {WEATHER} b {WEATHER}", parallel=False) == [
        Text("a"),
        *call(0, "weather", '{"city": "Bern"}'),
    ]
    bad = "<tool_call>no</tool_call>"
    assert parse(bad + WEATHER + bad, parallel=False) == [Text(bad), *call(0, "weather", '{"city": "Bern"}')]


def test_a_long_text_takes_linear_time() -> None:
    """200,000 characters of blank space, arguments, or a block that is none, in pieces of one."""
    long = "x" * 100_000
    for text in (" " * 200_000, WEATHER.replace("Bern", long), f'<tool_call>{{"x": "{long}"', "<" * 100_000):
        events = parse(*text)
        assert (
            sum(len(re.sub(r"\s", "", getattr(event, "text", ""))) for event in events)
            >= len(text.strip()) - 80
        )
