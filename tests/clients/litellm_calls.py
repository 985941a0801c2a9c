"""litellm, the gateway in front of many servers, here with ours behind it."""

import json
import sys

import litellm
from pydantic import BaseModel

given = json.loads(sys.argv[1])
say = given["say"]
common = {
    "model": f"openai/{given['model']}",
    "api_base": given["base_url"],
    "api_key": given["api_key"],
    "num_retries": 0,
    "max_retries": 0,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Trip(BaseModel):
    city: str
    days: int


def ask(content, **more):
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    return litellm.completion(messages=messages, **{**common, **more})


def stream():
    chunks = list(ask(say["chat"], stream=True, stream_options={"include_usage": True}))
    whole = litellm.stream_chunk_builder(chunks)
    return [whole.choices[0].message.content, whole.usage.total_tokens > 0]


def tool_turns(streamed):
    messages = [{"role": "user", "content": say["call"]}]
    reply = ask(messages, tools=[WEATHER], stream=streamed)
    choice = (litellm.stream_chunk_builder(list(reply)) if streamed else reply).choices[0]
    messages.append(choice.message.model_dump())
    for call in choice.message.tool_calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"21 degrees {say['answer']}"})
    called = [[call.function.name, json.loads(call.function.arguments)] for call in choice.message.tool_calls]
    answer = ask(messages, tools=[WEATHER]).choices[0].message.content
    return {"finish": choice.finish_reason, "calls": called, "answer": answer}


def error(content, **more):
    try:
        ask(content, **more)
    except Exception as error:
        return type(error).__name__


text = litellm.text_completion(
    prompt=say["chat"], max_tokens=99, **{**common, "model": f"text-completion-openai/{given['model']}"}
)
print(
    json.dumps({
        "chat": ask(say["chat"]).choices[0].message.content,
        "stream": stream(),
        "completions": text.choices[0].text,
        "tools": tool_turns(streamed=False),
        "tools_stream": tool_turns(streamed=True),
        "structured": json.loads(ask(say["trip"], response_format=Trip).choices[0].message.content),
        "wrong_key": error("x", api_key="wrong"),
        "too_long": error("word " * 3000),
    })
)  # fmt: skip
