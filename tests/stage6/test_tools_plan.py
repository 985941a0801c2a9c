"""Which tool requests are served, how a call is forced, and what the prompt shows of tools."""

from __future__ import annotations

import json
from copy import deepcopy

import pytest
import torch
from jsonschema import validate
from support.scripted_lm import toy_tokenizer

from common.detokenizer import IncrementalDetokenizer
from common.errors import InvalidValue
from common.model.loader import load_tokenizer
from common.protocol import FinishReason, Request
from common.sampling import sample
from common.sampling_params import SamplingParams
from common.sequence import Sequence
from common.structured import GrammarCompiler
from stage6_api.tool_events import Arguments, CallStart, Text, ToolEvent
from stage6_api.tools import ToolPlan, finish_reason, plan_tools
from stage6_api.tools_grammar import asked_grammar, final_grammar
from stage6_api.tools_prompt import with_tools

TOY = toy_tokenizer()
COMPILER = GrammarCompiler(TOY, len(TOY), {TOY.eos_token_id})


def tool(name: str, parameters: object = None, **more: object) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters} | more}


def named(name: str) -> dict:
    return {"type": "function", "function": {"name": name}}


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "unit": {"$ref": "#/$defs/unit"}},
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", "F"]}},
}
WEATHER, NOW = tool("get-weather", CITY), tool("now", {"type": "object", "properties": {}})
SCHEMAS = {"get-weather": CITY, "now": {"const": {}}, "roll_2": {"const": {}}}


def plan(
    tools: object, choice: object = None, parallel: bool = True, structured: bool = False
) -> ToolPlan | None:
    return plan_tools(tools, choice, parallel, structured, "hermes")  # type: ignore[arg-type]


def noise_events(
    grammar: object, seed: int, of: ToolPlan, max_tokens: int = 900
) -> tuple[list[ToolEvent], FinishReason]:
    """What is read, token by token, from the answer of a model whose logits are noise."""
    params = SamplingParams(seed=seed, max_tokens=max_tokens, skip_special_tokens=False)
    seq = Sequence(Request("r", (1,), params, grammar=COMPILER.compile(grammar)))  # type: ignore[arg-type]
    noise, ends = torch.Generator().manual_seed(seed), frozenset({TOY.eos_token_id})
    parser, events, text = of.new_parser(), [], IncrementalDetokenizer(TOY, (), skip_special_tokens=False)
    while not seq.finished:
        row = torch.randn(1, len(TOY), generator=noise) * 2
        row[0, TOY.eos_token_id] += 3  # so that a list of calls comes to an end
        seq.append(sample(row, [seq], ends)[0], ends, 10**6)
        if seq.token_ids[-1] != TOY.eos_token_id:
            events += parser.push(text.append(seq.token_ids[-1:]))
    assert seq.finish_reason is not None
    return events + parser.push(text.flush()) + parser.finish(), seq.finish_reason


def calls_of(events: list[ToolEvent]) -> list[tuple[str, object]]:
    calls = []
    for start in (event for event in events if isinstance(event, CallStart)):
        text = "".join(
            event.text for event in events if isinstance(event, Arguments) and event.index == start.index
        )
        calls.append((start.name, json.loads(text)))
    return calls


@pytest.mark.parametrize(
    ("tools", "choice", "structured", "field"),
    [
        ([], None, False, "tools"),  # 8.2 D4
        (None, "required", False, "tool_choice"),  # T16
        (None, "auto", False, "tool_choice"),
        (None, named("now"), False, "tool_choice"),  # T13
        ([NOW], named("later"), False, "tool_choice"),
        ([NOW], {}, False, "tool_choice"),
        ([NOW], {"type": "function"}, False, "tool_choice"),
        ([NOW], {"type": "function", "function": {"name": 3}}, False, "tool_choice"),
        ([NOW], "any", False, "tool_choice"),
        ([NOW], named("now"), True, "tool_choice"),  # T17
        ([NOW], "required", True, "tool_choice"),
        ([NOW, deepcopy(NOW)], None, False, "tools[1].function.name"),
        ([{"type": "web_search"}], None, False, "tools[0]"),
        (["now"], None, False, "tools[0]"),
        ([{"type": "function", "function": "now"}], None, False, "tools[0]"),
        ([tool("no spaces")], None, False, "tools[0].function.name"),
        ([tool("x" * 65)], None, False, "tools[0].function.name"),
        ([tool("")], None, False, "tools[0].function.name"),
        ([tool("line\n")], None, False, "tools[0].function.name"),
        ([tool("f", description=7)], None, False, "tools[0].function.description"),
        ([NOW, tool("f", {"$defs": {"a": 3}})], None, False, "tools[1].function.parameters (f)"),  # T26
        ([tool("f", {"type": "object", "$defs": []})], None, False, "tools[0].function.parameters (f)"),
        ([tool("f", [])], None, False, "tools[0].function.parameters (f)"),
        ([tool("f", {"type": "string"})], None, False, "tools[0].function.parameters (f)"),
        ([tool("f", {"not": {}})], "required", False, "tools[0].function.parameters"),
    ],
)  # fmt: skip
def test_what_is_refused(tools: object, choice: object, structured: bool, field: str) -> None:
    """Each by the name of its field, before anything runs."""
    with pytest.raises(InvalidValue) as caught:
        plan(tools, choice, structured=structured)
    assert caught.value.field == field


def test_an_unknown_parser_is_refused() -> None:
    """By the names that there are."""
    with pytest.raises(InvalidValue, match="hermes"):
        plan_tools([NOW], None, True, False, "none")


def test_what_is_no_tool_request() -> None:
    """vllm#9426: "none" is fine without tools, and with them."""
    assert plan(None) is plan(None, "none") is plan([NOW], "none") is None


def test_auto_leaves_the_model_free() -> None:
    """No grammar, also for a schema that could not be enforced; every tool is offered."""
    tools = [NOW, tool("f", {"type": "object", "not": {}})]
    for choice in (None, "auto"):
        made = plan(tools, choice)
        assert made is not None
        assert (made.grammar, made.named, made.tools) == (None, False, tools)
        assert final_grammar(made, None) is None


@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls(parallel: bool) -> None:
    """Noise calls some tool, with arguments of its schema, and more than one only if that is wanted."""
    made = plan([WEATHER, NOW, tool("roll_2")], "required", parallel)
    counts, names = set(), set()
    for seed in range(40):
        events, reason = noise_events(final_grammar(made, None), seed, made)
        assert reason is FinishReason.STOP
        calls = calls_of(events)
        for name, arguments in calls:
            validate(arguments, SCHEMAS[name])
        counts.add(len(calls))
        names.update(name for name, _ in calls)
        assert not any(isinstance(event, Text) for event in events)
    assert names == set(SCHEMAS)
    assert 0 not in counts
    assert (max(counts) > 1) is parallel


def test_a_named_call() -> None:
    """Exactly one call of exactly that function; T25: without parameters, its arguments are {}."""
    for name in ("get-weather", "roll_2"):
        made = plan([WEATHER, tool("roll_2")], named(name))
        for seed in range(10):
            [(called, arguments)] = calls_of(noise_events(made.grammar, seed, made)[0])
            assert called == name
            validate(arguments, SCHEMAS[name])


def test_a_forced_call_that_is_cut() -> None:
    """T14: one token is no call."""
    for choice in ("required", named("now")):
        made = plan([NOW], choice)
        events, reason = noise_events(made.grammar, 1, made, max_tokens=1)
        assert reason is FinishReason.LENGTH
        assert not any(isinstance(event, CallStart) for event in events)


def test_calls_or_an_answer_in_a_format() -> None:
    """openai-agents send tools and json_schema together: the model calls, or answers in the format."""
    answer = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    asked = asked_grammar({"type": "json_schema", "json_schema": {"name": "a", "schema": answer}}, None)
    made = plan([WEATHER, NOW], structured=True)
    seen = set()
    for seed in range(30):
        events, reason = noise_events(final_grammar(made, asked), seed, made)
        assert reason is FinishReason.STOP
        for name, arguments in calls_of(events):
            validate(arguments, SCHEMAS[name])
        text = "".join(event.text for event in events if isinstance(event, Text))
        if text:
            validate(json.loads(text), answer)
        seen.add(bool(text))
        assert bool(text) != any(isinstance(event, CallStart) for event in events)
    assert seen == {True, False}
    for way in (
        {"regex": "[a-c]+"},
        {"choice": ["x", "y"]},
        {"grammar": 'start: "x" | "y"'},
        {"grammar": 'root ::= "x"'},
    ):
        assert COMPILER.compile(final_grammar(made, asked_grammar(None, way)))
    assert final_grammar(None, asked) is asked


@pytest.mark.parametrize(
    ("choice", "engine", "made", "want"),
    [
        ("auto", "stop", True, "tool_calls"),
        ("auto", "stop", False, "stop"),
        ("auto", "length", True, "length"),
        ("auto", "length", False, "length"),
        ("required", "stop", True, "tool_calls"),
        ("required", "length", True, "length"),
        (named("now"), "stop", True, "stop"),
        (named("now"), "length", True, "length"),
        (named("now"), "length", False, "length"),
        (None, "stop", False, "stop"),
    ],
)
def test_finish_reasons(choice: object, engine: str, made: bool, want: str) -> None:
    """T20: the table of 3.2."""
    assert finish_reason(plan([NOW], choice) if choice else None, engine, made) == want


CALL = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "é"}'}}
HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "ten"},
    {"role": "tool", "tool_call_id": "call_1", "content": "eleven"},
    {"role": "assistant", "content": "It is ten.", "tool_calls": []},
]


def test_a_template_with_tools_gets_them() -> None:
    """Arguments as objects, so that its own `tojson` writes them once; no empty list of calls; nothing changed."""
    before = deepcopy(HISTORY)
    messages, tools = with_tools(HISTORY, plan([NOW]), TOY)
    assert before == HISTORY
    assert tools == [NOW]
    assert messages[2]["tool_calls"][0]["function"]["arguments"] == {"zone": "é"}
    assert messages[2]["content"] == ""
    assert "tool_calls" not in messages[5]
    text = TOY.decode(TOY.apply_chat_template(messages, tools=tools), skip_special_tokens=False)
    assert text.count('{"name": "now", "arguments": {"zone": "é"}}</tool_call>') == 2
    assert json.dumps(NOW, ensure_ascii=False) in text
    assert with_tools(HISTORY, None, TOY)[1] is None


@pytest.mark.model135
def test_a_template_without_tools_is_told_in_words() -> None:
    """SmolLM2's template has none: a preamble in the system message, calls and results as text."""
    tokenizer = load_tokenizer()
    messages, tools = with_tools(HISTORY, plan([NOW, WEATHER]), tokenizer)
    assert tools is None
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[0]["content"].startswith("Be brief.\n\n")
    assert all(json.dumps(each) in messages[0]["content"] for each in (NOW, WEATHER))
    parser = plan([NOW]).new_parser()
    assert calls_of(parser.push(messages[2]["content"])) == [("now", {"zone": "é"})] * 2
    responses = "<tool_response>\nten\n</tool_response>\n<tool_response>\neleven\n</tool_response>"
    assert messages[3]["content"] == responses
    assert tokenizer.apply_chat_template(messages)
    only, _ = with_tools([{"role": "user", "content": "Hi"}], plan([NOW]), tokenizer)
    assert [message["role"] for message in only] == ["system", "user"]
    plain, _ = with_tools([{"role": "user", "content": "Hi"}], None, tokenizer)
    assert plain == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("arguments", ["", "{}", None, {}])
def test_replayed_calls_without_arguments(arguments: object) -> None:
    """T11: all of these mean none."""
    call = {"function": {"name": "now", "arguments": arguments}}
    messages, _ = with_tools([{"role": "assistant", "tool_calls": [call]}], None, TOY)
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == {}


def test_replayed_arguments_that_are_no_json() -> None:
    """What the model once wrote wrong must not end the conversation: it is shown as it is."""
    call = {"function": {"name": "now", "arguments": '{"a": '}}
    messages, _ = with_tools([{"role": "assistant", "tool_calls": [call]}], None, TOY)
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == '{"a": '


@pytest.mark.parametrize("call", [{}, "now", {"function": {}}, {"function": {"name": "f", "arguments": 3}}])
def test_a_malformed_history_is_refused(call: object) -> None:
    """By its place in the messages."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [CALL, call]}]
    with pytest.raises(InvalidValue) as caught:
        with_tools(messages, None, TOY)
    assert caught.value.field == "messages[1].tool_calls[1]"
