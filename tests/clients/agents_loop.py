"""OpenAI's agents: a loop over three turns, with the chat model and with the default one (/v1/responses)."""

import asyncio
import json
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

given = json.loads(sys.argv[1])
say, seen = given["say"], []
client = AsyncOpenAI(base_url=given["base_url"], api_key=given["api_key"], max_retries=0)
set_tracing_disabled(True)


class Trip(BaseModel):
    city: str
    days: int


@function_tool
def weather(city: str) -> str:
    """The weather in a city; its answer leads the model to the next step."""
    seen.append(["weather", {"city": city}])
    return f"21 degrees {say['second_call'] if len(seen) == 1 else say['end']}"


def agent(kind, **more):
    return Agent(name="guide", instructions="Plan trips.", model=kind(given["model"], client), **more)


async def loop(kind, stream=False):
    """Call, call again, answer."""
    seen.clear()
    say["end"] = say["answer"]
    if stream:
        result = Runner.run_streamed(agent(kind, tools=[weather]), say["call"])
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent(kind, tools=[weather]), say["call"])
    return {"calls": list(seen), "answer": result.final_output, "turns": len(result.raw_responses)}


async def typed_loop(kind):
    """Tools and an output type together."""
    seen.clear()
    say["end"] = say["trip"]
    result = await Runner.run(agent(kind, tools=[weather], output_type=Trip), say["call"])
    return {"calls": list(seen), "output": result.final_output.model_dump()}


async def stream(kind):
    result, text = Runner.run_streamed(agent(kind), say["chat"]), ""
    async for event in result.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            text += event.data.delta
    return text


async def main():
    found = {}
    for name, kind in {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}.items():
        found[name] = {
            "chat": (await Runner.run(agent(kind), say["chat"])).final_output,
            "stream": await stream(kind),
            "tools": await loop(kind),
            "tools_stream": await loop(kind, stream=True),
            "structured": (
                await Runner.run(agent(kind, output_type=Trip), say["trip"])
            ).final_output.model_dump(),
            "tools_structured": await typed_loop(kind),
        }
    print(json.dumps(found))


asyncio.run(main())
