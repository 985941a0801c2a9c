"""Tool calling over HTTP: calls and results in the prompt, calls in the answer, whole and as deltas (6.3)."""

from __future__ import annotations

import json
import re

import pytest
from jsonschema import validate

CHAT = "/v1/chat/completions"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
NOW = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
ARGUMENTS = '{"city": "Bern", "unit": "C"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
TURNED = f'<tool_call>{{"arguments": {ARGUMENTS}, "name": "weather"}}</tool_call>'


def post(live, text, **more):
    """The first choice of a chat request that must succeed."""
    answer = live.http.post(CHAT, json=live.chat(text, **{"tools": [WEATHER, NOW], **more}))
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def calls(choice):
    """(name, arguments) of a whole answer's calls, their ids checked."""
    made = choice["message"].get("tool_calls", [])
    assert len({call["id"] for call in made}) == len(made)
    assert all(call["type"] == "function" and len(call["id"]) >= 9 for call in made)
    return [(call["function"]["name"], call["function"]["arguments"]) for call in made]


def streamed(live, text, **more):
    """(content, calls, finish reason) of each answer of a stream, every delta's form checked."""
    body = live.chat(text, **{"tools": [WEATHER, NOW], **more})
    read = [Reader() for _ in range(body.get("n", 1))]
    for chunk in live.stream(body):
        [choice] = chunk["choices"]
        read[choice["index"]].take(choice)
    return [(reader.content, reader.calls, reader.reason) for reader in read]


class Reader:
    """What a strict client makes of the deltas of one answer (OPENAI_API.md 3.2 and 5.2)."""

    def __init__(self):
        self.content, self.calls, self.reason = "", [], None
        self._ids, self._begun = set(), False

    def take(self, choice):
        assert self.reason is None, "nothing comes after the reason"
        delta = choice["delta"]
        assert ("role" in delta) is not self._begun
        self._begun = True
        self.content += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            self._take_call(call)
        self.reason = choice["finish_reason"]
        assert self.reason is None or delta == {}

    def _take_call(self, call):
        if "id" in call:
            assert (call["index"], call["type"]) == (len(self.calls), "function")
            assert call["function"]["arguments"] == ""
            assert call["id"] not in self._ids
            self._ids.add(call["id"])
            self.calls.append((call["function"]["name"], ""))
        else:
            assert set(call) == {"index", "function"}
            assert set(call["function"]) == {"arguments"}
            name, arguments = self.calls[call["index"]]
            self.calls[call["index"]] = name, arguments + call["function"]["arguments"]


def test_tools_that_are_not_needed(live):
    """T2: text as ever, no tool_calls, and no word of them in the reason; plain and streamed."""
    marker = live.lm.say("The answer is <b> 5.")
    choice = post(live, marker)
    assert choice["message"] == {"role": "assistant", "content": "The answer is <b> 5.", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert streamed(live, marker) == [("The answer is <b> 5.", [], "stop")]


@pytest.mark.parametrize("script", [CALL, TURNED], ids=["name first", "arguments first"])
def test_a_call(live, script):
    """T4, T10, section 7 rows 1, 2, 40: id and name once, arguments in pieces that join to the plain answer's."""
    marker = live.lm.say("I look." + script)
    choice = post(live, marker)
    assert choice["message"]["content"] == "I look."
    assert calls(choice) == [("weather", ARGUMENTS)]
    assert choice["finish_reason"] == "tool_calls"
    assert streamed(live, marker) == [("I look.", [("weather", ARGUMENTS)], "tool_calls")]
    only = post(live, live.lm.say(script))
    assert only["message"]["content"] is None


def test_a_call_in_one_delta(live):
    """Section 7, row 4: a stop string that it resembles to the end holds the whole call back."""
    pieces = live.stream(live.chat(live.lm.say(CALL), tools=[WEATHER], stop=[f"{CALL}!"]))
    deltas = [chunk["choices"][0]["delta"] for chunk in pieces]
    assert [len(delta.get("tool_calls", ())) for delta in deltas] == [0, 1, 1, 0]
    assert deltas[2]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS


@pytest.mark.parametrize("parallel", [True, None, False])
def test_two_calls(live, parallel):
    """T8, section 7 row 5: indexes 0 and 1; without parallel calls the first one only."""
    script = f'{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
    expected = [("weather", ARGUMENTS), ("now", "{}")][: 1 if parallel is False else 2]
    marker = live.lm.say(script)
    choice = post(live, marker, parallel_tool_calls=parallel)
    assert (calls(choice), choice["finish_reason"]) == (expected, "tool_calls")
    [(_, made, reason)] = streamed(live, marker, parallel_tool_calls=parallel)
    assert (made, reason) == (expected, "tool_calls")


def turns(results, content=None, arguments=ARGUMENTS):
    """A question, calls of it, and what they brought."""
    function = {"name": "weather", "arguments": arguments}
    made = [{"id": f"call_{i}", "type": "function", "function": function} for i in range(len(results))]
    told = [
        {"role": "tool", "tool_call_id": f"call_{i}", "content": result} for i, result in enumerate(results)
    ]
    question = {"role": "user", "content": "Weather?"}
    return [question, {"role": "assistant", "content": content, "tool_calls": made}, *told]


def test_results_of_calls(live):
    """T5, T7: the model reads every call and every result, and answers in words."""
    results = ["sunny", "rainy" + live.lm.say("Sun and rain.")]
    choice = post(live, "", messages=turns(results))
    assert choice["message"]["content"] == "Sun and rain."
    assert "tool_calls" not in choice["message"]
    assert streamed(live, "", messages=turns(results)) == [("Sun and rain.", [], "stop")]
    prompt = live.http.post("/tokenize", json={"messages": turns(results), "tools": [WEATHER]}).json()
    text = live.http.post("/detokenize", json={"tokens": prompt["tokens"]}).json()["prompt"]
    assert all(result in text for result in results)
    assert text.count(f'{{"name": "weather", "arguments": {ARGUMENTS}}}') == 2


@pytest.mark.parametrize("content", [None, "", "Let me see."])
@pytest.mark.parametrize("arguments", ["", "{}", ARGUMENTS])
def test_replayed_calls(live, content, arguments):
    """T11, section 7 row 28: a turn with calls and no text, and calls without arguments."""
    messages = turns(["ok" + live.lm.say("Done.")], content, arguments)
    assert post(live, "", messages=messages)["message"]["content"] == "Done."


@pytest.mark.parametrize("more", [
    {"tools": None, "tool_choice": NAMED},
    {"tools": [NOW], "tool_choice": NAMED},
    {"tool_choice": {}},
    {"tools": None, "tool_choice": "required"},
    {"tools": None, "tool_choice": "auto"},
    {"tool_choice": NAMED, "structured_outputs": {"regex": "a"}},
])  # fmt: skip
def test_choices_that_cannot_be(live, more):
    """T13, T16, T17: a 400 that names tool_choice."""
    for stream in (False, True):
        answer = live.http.post(CHAT, json=live.chat("x", **{"tools": [WEATHER], **more, "stream": stream}))
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "tool_choice"


@pytest.mark.parametrize(("tools", "word"), [
    ([], "at least one"),  # 8.2 D4
    ([{"type": "function", "function": {"name": "bad", "parameters": {"$defs": {"a": 3}}}}], "bad"),
    ([{"type": "function", "function": {"name": "bad", "parameters": {"type": "object", "$defs": []}}}], "bad"),
    ([WEATHER, WEATHER], "weather"),
])  # fmt: skip
def test_malformed_tools(live, tools, word):
    """T26: a 400 that names the tool."""
    answer = live.http.post(CHAT, json=live.chat("x", tools=tools))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("tools")
    assert word in answer.json()["error"]["message"]


def test_auto_beside_a_format(live):
    """T17: agents send both; the answer is a call, or text in the format."""
    more = {"structured_outputs": {"choice": ["yes", "no"]}}
    assert calls(post(live, live.lm.say(CALL), **more)) == [("weather", ARGUMENTS)]
    assert post(live, live.lm.say("no"), **more)["message"]["content"] == "no"
    assert post(live, live.lm.say("no"), **more)["finish_reason"] == "stop"


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_forced_calls_of_noise(live, choice):
    """T10, T22: a model that has nothing to say calls as its schema wants; choices do not mix in a stream."""
    more = {"tool_choice": choice, "parallel_tool_calls": False, "temperature": 1, "n": 2}
    seen = set()
    for seed in range(3):
        body = live.chat("x", tools=[WEATHER], seed=seed, **more)
        plain = live.http.post(CHAT, json=body).json()["choices"]
        expected = [calls(answer) for answer in plain]
        read = streamed(live, "x", tools=[WEATHER], seed=seed, **more)
        assert [made for _, made, _ in read] == expected
        reason = "tool_calls" if choice == "required" else "stop"
        assert {answer["finish_reason"] for answer in plain} == {reason for _, _, reason in read} == {reason}
        for made in expected:
            [(name, arguments)] = made
            assert name == "weather"
            validate(json.loads(arguments), CITY)
        seen |= {str(made) for made in expected}
    assert len(seen) == 6


@pytest.mark.parametrize("hold", ["x", '<tool_call>\n{"name": "weather", "argumentsX', "}\n</tool_call>X"])
def test_required_with_braces_in_a_string(live, hold):
    """T23: exact, in pieces of several lengths (what resembles a stop string comes in one piece)."""
    arguments = '{"city": "a}b{"}'
    marker = live.lm.say(f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>')
    read = streamed(live, marker, tool_choice="required", stop=[hold])
    assert read == [("", [("weather", arguments)], "tool_calls")]


def test_named_without_parameters(live):
    """T25: its arguments are {}."""
    choice = post(live, "x", tool_choice={"type": "function", "function": {"name": "now"}}, temperature=1)
    assert calls(choice) == [("now", "{}")]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_cut_by_max_tokens(live, choice):
    """T14: "length", nothing half done, no crash."""
    answer = post(live, "x", tool_choice=choice, max_completion_tokens=1)
    assert answer["finish_reason"] == "length"
    assert "tool_calls" not in answer["message"]
    assert streamed(live, "x", tool_choice=choice, max_completion_tokens=1)[0][1:] == ([], "length")


def test_a_malformed_call_is_text(live):
    """3.3: what the model wrote, not an error."""
    script = '<tool_call>{"name": "weather", "arg'
    for text in (script, f"{script}</tool_call>"):
        marker = live.lm.say(text)
        choice = post(live, marker)
        assert re.sub(r"\s", "", choice["message"]["content"]) == re.sub(r"\s", "", text)
        assert streamed(live, marker)[0][1:] == ([], "stop")
