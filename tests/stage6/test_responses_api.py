"""`/v1/responses`, the stateless subset (OPENAI_API.md 1.6, rows R)."""

from __future__ import annotations

import json

import openai
import pytest

from stage6_api.schemas_responses import ResponseEvent, ResponseObject

PATH = "/v1/responses"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Weather of a city",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'


def post(live, **body):
    """The parsed answer to a request that must succeed, its shape checked."""
    answer = live.http.post(PATH, json={"temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    ResponseObject.model_validate(answer.json(), strict=True)
    return answer.json()


def stream(live, **body):
    """The events, framing and numbering checked, and every opening closed in reverse order."""
    answer = live.http.post(PATH, json={"temperature": 0, **body, "stream": True})
    assert answer.status_code == 200, answer.text
    events, opened = [], []
    for frame in answer.text.strip().split("\n\n"):
        kind, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        assert event["sequence_number"] == len(events)
        ResponseEvent.model_validate(event, strict=True)
        events.append(event)
        name = event["type"].removeprefix("response.")
        if name.endswith(".added"):
            opened.append(name.removesuffix(".added"))
        elif name in ("content_part.done", "output_item.done"):
            assert opened.pop() == name.removesuffix(".done")
    assert not opened
    return events


def joined(events, kind):
    return "".join(event["delta"] for event in events if event["type"] == f"response.{kind}.delta")


def test_text_in_text_out(live):
    """R1: the last item is a message with text; the official client reads it."""
    answer = live.openai.responses.create(model="toy", input="hi " + live.lm.say("Hello AB"), temperature=0)
    assert answer.output_text == "Hello AB"
    assert answer.status == "completed"
    assert answer.usage.output_tokens == 5
    assert answer.usage.total_tokens == answer.usage.input_tokens + 5
    raw = post(live, input=live.lm.say("Hello AB"), store=True, metadata={"a": "b"})
    assert raw["output"][-1]["content"][0]["type"] == "output_text"
    assert raw["id"].startswith("resp_") or raw["id"].startswith("resp-")
    assert raw["metadata"] == {"a": "b"}


def test_instructions_and_items_are_a_conversation(live):
    """1.6: the prompt is the one that chat would make of it."""
    marker = live.lm.say("Sunny.")
    items = [
        {"role": "user", "content": "Weather in Bern?"},
        {"type": "reasoning", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "One moment."}]},
        {
            "type": "function_call",
            "call_id": "c1",
            "name": "weather",
            "arguments": '{"city": "Bern"}',
            "id": "fc_1",
        },
        {"type": "function_call_output", "call_id": "c1", "output": "sun " + marker},
    ]
    answer = post(live, instructions="Be brief.", input=items)
    assert answer["output"][0]["content"][0]["text"] == "Sunny."
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather in Bern?"},
        {"role": "assistant", "content": "One moment.", "tool_calls": [call]},
        {"role": "tool", "content": "sun " + marker, "tool_call_id": "c1"},
    ]
    chat = live.http.post("/v1/chat/completions", json=live.chat("", messages=messages)).json()
    assert answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_stream(live):
    """R3, R4: created first, completed last, deltas joined are the final text."""
    events = stream(live, input=live.lm.say("Hello AB 🙂 the world"))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    final = events[-1]["response"]
    assert (
        final["output"][0]["content"][0]["text"] == joined(events, "output_text") == "Hello AB 🙂 the world"
    )
    assert events[0]["response"]["output"] == []
    assert events[2]["item"]["content"] == []
    ResponseObject.model_validate(final, strict=True)
    with live.openai.responses.stream(model="toy", input=live.lm.say("Hello AB"), temperature=0) as official:
        assert any(event.type == "response.output_text.delta" for event in official)
        assert official.get_final_response().output_text == "Hello AB"


def test_cut_answer_is_incomplete(live):
    """R6."""
    body = {"input": live.lm.say("A" * 50), "max_output_tokens": 5}
    for answer in (post(live, **body), stream(live, **body)[-1]["response"]):
        assert answer["status"] == "incomplete"
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        assert answer["output"][0]["content"][0]["text"] == "AAAAA"
    assert stream(live, **body)[-1]["type"] == "response.incomplete"


def test_logprobs(live):
    """R7: there, none above 0, five alternatives each, the same in a stream."""
    body = {"input": live.lm.say("Hello 🙂"), "include": ["message.output_text.logprobs"], "top_logprobs": 5}
    scores = post(live, **body)["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in scores[:3]] == ["Hel", "lo", " "]
    assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 5 for entry in scores)
    events = stream(live, **body)
    streamed = [
        entry for event in events if event["type"].endswith("text.delta") for entry in event["logprobs"]
    ]
    assert streamed in (
        scores[:-1],
        scores,
    )  # the end's own has no text: it may come with the last text, or later
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == scores


def test_nothing_is_stored(live):
    """R9: a 404 that says "not found", for every way to ask."""
    with pytest.raises(openai.NotFoundError, match="not found"):
        live.openai.responses.create(model="toy", input="x", previous_response_id="resp_1")
    with pytest.raises(openai.NotFoundError, match="not found"):
        live.openai.responses.retrieve("resp_1")
    with pytest.raises(openai.NotFoundError, match="not found"):
        live.openai.responses.cancel("resp_1")


@pytest.mark.parametrize(("body", "param"), [
    ({}, "input"), ({"input": ""}, "input"), ({"input": []}, "input"), ({"input": 5}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    ({"input": [{"type": "function_call_output", "output": 5}]}, "input"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "messages"),
    ({"input": [{"role": 5, "content": "x"}]}, "input"),
    ({"input": "x", "background": True}, "background"),
    ({"input": "x", "tools": [{"type": "web_search"}]}, "tools"),
    ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "x", "temperature": 3}, "temperature"),
    ({"input": "x", "conversation": "c"}, "conversation"),
    ({"input": "x", "text": {"format": 5}}, "text"),
])  # fmt: skip
def test_refused(live, body, param):
    """What cannot be served is named."""
    answer = live.http.post(PATH, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_function_calls(live):
    """R10: an item with the call; in a stream the deltas join to what the done event says."""
    body = {"input": "Weather? " + live.lm.say("I look. " + CALL), "tools": [WEATHER]}
    answer = post(live, **body)
    message, call = answer["output"]
    assert message["content"][0]["text"].strip() == "I look."
    assert (call["type"], call["name"], json.loads(call["arguments"])) == (
        "function_call",
        "weather",
        {"city": "Bern"},
    )
    events = stream(live, **body)
    [done] = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert joined(events, "function_call_arguments") == done["arguments"] == call["arguments"]
    assert events[-1]["response"]["output"][1]["name"] == "weather"


def test_forced_function_call(live):
    """R10: required and named choices are honoured by a model that has nothing to say about it."""
    for choice in ("required", {"type": "function", "name": "weather"}):
        more = {"parallel_tool_calls": False, "temperature": 1, "seed": 1}
        answer = post(live, input="random", tools=[WEATHER], tool_choice=choice, **more)
        [call] = [item for item in answer["output"] if item["type"] == "function_call"][:1]
        assert set(json.loads(call["arguments"])) == {"city"}


def test_structured_text(live):
    """1.6: text.format, as `responses.parse` sends it."""
    schema = WEATHER["parameters"]
    form = {"type": "json_schema", "name": "city", "schema": schema, "strict": True}
    answer = post(live, input="random", text={"format": form}, temperature=1, seed=1)
    assert set(json.loads(answer["output"][0]["content"][0]["text"])) == {"city"}


def test_failing_stream(live):
    """2.7: the error is an event that the official client raises."""
    marker = live.lm.say("Hello", poison_at=1)
    stream = live.openai.responses.create(model="toy", input=marker, stream=True)
    with pytest.raises(openai.APIError, match="engine failed"):
        list(stream)
    assert live.http.post(PATH, json={"input": marker}).status_code == 500
