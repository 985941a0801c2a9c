"""instructor: structured output by a named tool (its default), by a JSON schema, and in parts of a stream."""

import json
import sys

import instructor
import openai
from pydantic import BaseModel

given = json.loads(sys.argv[1])
model, say = given["model"], given["say"]
plain = openai.OpenAI(base_url=given["base_url"], api_key=given["api_key"], max_retries=0)


class Trip(BaseModel):
    city: str
    days: int


def ask(mode, marker):
    client = instructor.from_openai(plain, mode=mode)
    messages = [{"role": "user", "content": say[marker]}]
    return client.create(model=model, messages=messages, response_model=Trip, max_retries=0).model_dump()


def partial():
    client = instructor.from_openai(plain)
    messages = [{"role": "user", "content": say["partial_call"]}]
    parts = list(client.create_partial(model=model, messages=messages, response_model=Trip, max_retries=0))
    return [parts[-1].model_dump(), len(parts) > 1]


print(
    json.dumps({
        "structured": ask(instructor.Mode.TOOLS, "trip_call"),
        "structured_schema": ask(instructor.Mode.JSON_SCHEMA, "trip"),
        "structured_json": ask(instructor.Mode.JSON, "trip"),
        "stream": partial(),
    })
)  # fmt: skip
