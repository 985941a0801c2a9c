"""The official Python client, as its own documentation uses it; the same file for majors 2 and 3."""

import json
import sys

import openai
from pydantic import BaseModel

given = json.loads(sys.argv[1])
model, say = given["model"], given["say"]
client = openai.OpenAI(base_url=given["base_url"], api_key=given["api_key"], max_retries=0)


class Trip(BaseModel):
    city: str
    days: int


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def user(text):
    return [{"role": "user", "content": text}]


def tool_turns(stream):
    """Ask, run the call, answer with its result."""
    messages = user(say["call"])
    asked = {"model": model, "tools": [WEATHER]}
    if stream:
        with client.chat.completions.stream(messages=messages, **asked) as events:
            list(events)
            choice = events.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(messages=messages, **asked).choices[0]
    call = choice.message.tool_calls[0]
    messages.append(choice.message.model_dump(exclude={"parsed"}))  # with refusal, audio and all
    messages.append({"role": "tool", "tool_call_id": call.id, "content": f"21 degrees {say['answer']}"})
    answer = client.chat.completions.create(messages=messages, **asked).choices[0].message.content
    called = [[call.function.name, json.loads(call.function.arguments)]]
    return {"finish": choice.finish_reason, "calls": called, "answer": answer}


def forced(tool_choice):
    choice = client.chat.completions.create(
        model=model, messages=user(say["call"]), tools=[WEATHER], tool_choice=tool_choice
    ).choices[0]
    [call] = choice.message.tool_calls
    return [choice.finish_reason, call.function.name, json.loads(call.function.arguments)]


def stream():
    chunks = list(
        client.chat.completions.create(
            model=model, messages=user(say["chat"]), stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    return [text, chunks[-1].usage.total_tokens > 0]


def parallel_calls():
    with client.chat.completions.stream(model=model, messages=user(say["calls"]), tools=[WEATHER]) as events:
        list(events)
        calls = events.get_final_completion().choices[0].message.tool_calls
    return [[call.function.name, json.loads(call.function.arguments)] for call in calls]


def structured():
    parsed = client.chat.completions.parse(
        model=model, messages=user(say["trip"]), response_format=Trip
    ).choices[0]
    return parsed.message.parsed.model_dump()


def cut_short():
    try:
        client.chat.completions.parse(
            model=model, messages=user(say["trip"]), response_format=Trip, max_tokens=5
        )
    except openai.LengthFinishReasonError as error:
        return type(error).__name__


def responses():
    plain = client.responses.create(model=model, input=say["chat"]).output_text
    with client.responses.stream(model=model, input=say["chat"]) as events:
        kinds = [event.type for event in events]
        final = events.get_final_response().output_text
    parsed = client.responses.parse(model=model, input=say["trip"], text_format=Trip).output_parsed
    return [plain, final, kinds[0], kinds[-1], parsed.model_dump()]


def error(ask):
    try:
        ask()
    except openai.APIStatusError as error:
        return [type(error).__name__, error.status_code, error.code, error.type, bool(error.request_id)]


stranger = openai.OpenAI(base_url=given["base_url"], api_key="wrong", max_retries=0)
print(
    json.dumps({
        "chat": client.chat.completions.create(model=model, messages=user(say["chat"]))
        .choices[0].message.content,
        "stream": stream(),
        "completions": client.completions.create(model=model, prompt=say["chat"], max_tokens=99)
        .choices[0].text,
        "tools": tool_turns(stream=False),
        "tools_stream": tool_turns(stream=True),
        "parallel": parallel_calls(),
        "required": forced("required"),
        "named": forced({"type": "function", "function": {"name": "weather"}}),
        "structured": structured(),
        "cut_short": cut_short(),
        "responses": responses(),
        "models": [entry.id for entry in client.models.list()],
        "model": client.models.retrieve(model).id,
        "wrong_key": error(stranger.models.list),
        "wrong_model": error(lambda: client.models.retrieve("nobody/nothing")),
        "too_long": error(lambda: client.chat.completions.create(model=model, messages=user("word " * 3000))),
    })
)  # fmt: skip
