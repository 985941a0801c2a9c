"""Well-known clients against our server, by nothing but its base URL (OPENAI_API.md 3.1, 5.2 and 8.4).

What the model says is scripted, so every text, call and object is known beforehand; each client's script prints
what it has got.  A script's name for a thing says what a person would do with the client.
"""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.clients, pytest.mark.slow]

TRIP = {"city": "Zürich", "days": 3}
CHAT, ANSWER = 'Grüezi! Half 🙂, half a <tool> and "quotes".', "It is 21 degrees in Zürich."
PARIS, ROME = ["weather", {"city": "Paris"}], ["weather", {"city": "Rome"}]


def call(name: str, arguments: dict) -> str:
    written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"


SAYS = {
    "chat": CHAT,
    "answer": ANSWER,
    "call": call(*PARIS),
    "second_call": call(*ROME),
    "calls": f"{call(*PARIS)}\n{call(*ROME)}",
    "trip": json.dumps(TRIP, ensure_ascii=False),
    "trip_call": call("Trip", TRIP),
    "partial_call": call("PartialTrip", TRIP),
    "final_result": call("final_result", TRIP),
}
STREAM = [CHAT, True]  # the deltas joined, and whether there was a usage
TOOLS = {"finish": "tool_calls", "calls": [PARIS], "answer": ANSWER}
OFFICIAL = {
    "chat": CHAT,
    "stream": STREAM,
    "tools": TOOLS,
    "tools_stream": TOOLS,
    "parallel": [PARIS, ROME],
    "structured": TRIP,
    "models": ["toy", "org/alias"],
    "model": "toy",
    "wrong_key": ["AuthenticationError", 401, "invalid_api_key", "authentication_error", True],
    "wrong_model": ["NotFoundError", 404, "model_not_found", "NotFoundError", True],
    "too_long": ["BadRequestError", 400, "context_length_exceeded", "BadRequestError", True],
}


@pytest.mark.parametrize("client", ["openai-python-2", "openai-python-3"])
def test_openai_python(ask, client):
    """Both majors of the official Python client."""
    events = ["response.created", "response.completed"]
    assert ask(client, SAYS) == OFFICIAL | {
        "completions": CHAT,
        "required": ["tool_calls", *PARIS],
        "named": ["stop", *PARIS],
        "cut_short": "LengthFinishReasonError",
        "responses": [CHAT, CHAT, *events, TRIP],
    }


@pytest.mark.parametrize("client", ["openai-node"])
def test_openai_node(ask, client):
    """The official npm client, and the loop over tools that it brings."""
    assert ask(client, SAYS) == OFFICIAL | {"run_tools": ANSWER, "responses": [CHAT, CHAT]}


@pytest.mark.parametrize("client", ["ai-sdk"])
def test_ai_sdk(ask, client):
    """Vercel's AI SDK, which runs the tools by itself."""
    tools = TOOLS | {"finish": "tool-calls"}
    assert ask(client, SAYS) == {
        "chat": CHAT,
        "stream": STREAM,
        "tools": tools,
        "tools_stream": tools,
        "structured": TRIP,
        "wrong_key": [401, False, False],  # status, worth a second try, names the context length
        "too_long": [400, False, True],
    }


@pytest.mark.parametrize("client", ["langchain"])
def test_langchain(ask, client):
    """langchain-openai: chat, completions, tools, and three ways to structured output."""
    assert ask(client, SAYS) == {
        "chat": CHAT,
        "stream": STREAM,
        "completions": CHAT,
        "tools": TOOLS,
        "tools_stream": TOOLS,
        "structured": TRIP,
        "structured_call": TRIP,
        "structured_json": TRIP,
        "too_long": True,
    }


@pytest.mark.parametrize("client", ["openai-agents"])
def test_openai_agents(ask, client):
    """A loop over three turns (call, call, answer), by chat and by responses, which is the default."""
    loop = {"calls": [PARIS, ROME], "answer": ANSWER, "turns": 3}
    either = {
        "chat": CHAT,
        "stream": CHAT,
        "tools": loop,
        "tools_stream": loop,
        "structured": TRIP,
        "tools_structured": {"calls": [PARIS, ROME], "output": TRIP},
    }
    assert ask(client, SAYS) == {"chat": either, "responses": either}


@pytest.mark.parametrize("client", ["pydantic-ai"])
def test_pydantic_ai(ask, client):
    """pydantic-ai: output by a required tool and by a JSON schema."""
    tools = {"calls": [PARIS], "answer": ANSWER}
    assert ask(client, SAYS) == {
        "chat": CHAT,
        "stream": STREAM,
        "tools": tools,
        "tools_stream": tools,
        "structured": TRIP,
        "structured_stream": TRIP,
        "structured_native": TRIP,
        "tools_structured": TRIP,
    }


@pytest.mark.parametrize("client", ["instructor"])
def test_instructor(ask, client):
    """instructor: objects only, by a named tool, by a schema, as plain JSON, and growing in a stream."""
    assert ask(client, SAYS) == {
        "structured": TRIP,
        "structured_schema": TRIP,
        "structured_json": TRIP,
        "stream": [TRIP, True],
    }


@pytest.mark.parametrize("client", ["litellm"])
def test_litellm(ask, client):
    """litellm, and the errors that its users catch."""
    assert ask(client, SAYS) == {
        "chat": CHAT,
        "stream": STREAM,
        "completions": CHAT,
        "tools": TOOLS,
        "tools_stream": TOOLS,
        "structured": TRIP,
        "wrong_key": "AuthenticationError",
        "too_long": "ContextWindowExceededError",
    }
