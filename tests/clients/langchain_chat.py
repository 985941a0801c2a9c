"""LangChain's chat and completions classes, its three ways to structured output, and its errors."""

import json
import sys

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

given = json.loads(sys.argv[1])
say = given["say"]
common = {"base_url": given["base_url"], "api_key": given["api_key"], "max_retries": 0}
chat = ChatOpenAI(model=given["model"], **common)


class Trip(BaseModel):
    """A trip to plan."""

    city: str
    days: int


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"21 degrees {say['answer']}"


def tool_turns(stream):
    model = chat.bind_tools([weather])
    messages = [HumanMessage(say["call"])]
    if stream:
        reply = None
        for chunk in model.stream(messages):
            reply = chunk if reply is None else reply + chunk
    else:
        reply = model.invoke(messages)
    messages.append(reply)
    for call in reply.tool_calls:
        messages.append(ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]))
    return {
        "finish": reply.response_metadata["finish_reason"],
        "calls": [[call["name"], call["args"]] for call in reply.tool_calls],
        "answer": model.invoke(messages).content,
    }


def stream():
    chunks = list(chat.stream(say["chat"], stream_usage=True))
    total = sum(chunk.usage_metadata["total_tokens"] for chunk in chunks if chunk.usage_metadata)
    return ["".join(chunk.content for chunk in chunks), total > 0]


def structured(method, marker):
    return chat.with_structured_output(Trip, method=method).invoke(say[marker]).model_dump()


def too_long():
    try:
        chat.invoke("word " * 3000)
    except ContextOverflowError as error:
        return isinstance(error, ContextOverflowError)


text = OpenAI(model=given["model"], max_tokens=99, **common)
print(
    json.dumps({
        "chat": chat.invoke(say["chat"]).content,
        "stream": stream(),
        "completions": text.invoke(say["chat"]),  # a list of prompts, and nulls for logprobs and seed
        "tools": tool_turns(stream=False),
        "tools_stream": tool_turns(stream=True),
        "structured": structured("json_schema", "trip"),
        "structured_call": structured("function_calling", "trip_call"),
        "structured_json": structured("json_mode", "trip"),
        "too_long": too_long(),
    })
)  # fmt: skip
