"""pydantic-ai, which checks every answer against a schema and refuses what it does not know."""

import asyncio
import json
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

given = json.loads(sys.argv[1])
say, seen = given["say"], []
provider = OpenAIProvider(base_url=given["base_url"], api_key=given["api_key"])
model = OpenAIChatModel(given["model"], provider=provider)


class Trip(BaseModel):
    city: str
    days: int


def guide(end=None, **more):
    agent = Agent(model, retries=0, **more)

    @agent.tool_plain
    def weather(city: str) -> str:
        """The weather in a city."""
        seen.append(["weather", {"city": city}])
        return f"21 degrees {end}"

    return agent


async def tool_turns(stream):
    seen.clear()
    agent = guide(say["answer"])
    if stream:
        async with agent.run_stream(say["call"]) as result:
            answer = await result.get_output()
    else:
        answer = (await agent.run(say["call"])).output
    return {"calls": list(seen), "answer": answer}


async def stream():
    async with Agent(model).run_stream(say["chat"]) as result:
        text = "".join([delta async for delta in result.stream_text(delta=True, debounce_by=None)])
    return [text, result.usage.output_tokens > 0]


async def structured_stream():
    async with Agent(model, output_type=Trip, retries=0).run_stream(say["final_result"]) as result:
        return (await result.get_output()).model_dump()


async def main():
    typed = Agent(model, output_type=Trip, retries=0)
    native = Agent(model, output_type=NativeOutput(Trip), retries=0)
    both = guide(say["final_result"], output_type=Trip)
    found = {
        "chat": (await Agent(model).run(say["chat"])).output,
        "stream": await stream(),
        "tools": await tool_turns(stream=False),
        "tools_stream": await tool_turns(stream=True),
        "structured": (await typed.run(say["final_result"])).output.model_dump(),
        "structured_stream": await structured_stream(),
        "structured_native": (await native.run(say["trip"])).output.model_dump(),
        "tools_structured": (await both.run(say["call"])).output.model_dump(),
    }
    print(json.dumps(found))


asyncio.run(main())
