"""Agents over HTTP: one long system prompt, a tool that is called turn after turn, and what the cache finds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import httpx

from common.bench.arrivals import arrival_times
from common.bench.metrics import percentiles
from common.bench.serve_stream import events

AGENTS_PER_SECOND = 1.0
ANSWER = 32  # tokens of an agent's last turn, which is text
TOPICS = ("weather", "trains", "hotels", "museums", "food", "prices", "safety", "language")
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look something up in the guide.",
        "parameters": {
            "type": "object",
            "properties": {"topic": {"enum": list(TOPICS)}},
            "required": ["topic"],
            "additionalProperties": False,
        },
    },
}


@dataclass(frozen=True)
class Turn:
    """One request of one agent: its number, tokens of the prompt, how many were cached, time to first token."""

    turn: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_s: float


def run_agents(base: str, agents: int, turns: int, system_tokens: int, seed: int = 0) -> list[Turn]:
    """Let agents work at the same time; each turn sends the whole conversation again, as agents do.

    In every turn but the last the model must call the tool, whose result comes back with the next turn.

    Args:
        base: the server's URL, without /v1.
        agents: how many; they begin one by one at random, one per second on average.
        turns: requests of each.
        system_tokens: length of the system prompt that they all begin with.
        seed: of the times.
    """
    return asyncio.run(_run_agents(base, agents, turns, system_tokens, seed))


def agent_figures(found: Seq[Turn]) -> dict[str, Any]:
    """Per turn and in all: requests, tokens of the prompts, the cached share of them, time to first token."""
    by_turn = {
        str(turn): [one for one in found if one.turn == turn] for turn in sorted({t.turn for t in found})
    }
    return {label: _figures(turns) for label, turns in {**by_turn, "all": list(found)}.items()}


def _figures(turns: Seq[Turn]) -> dict[str, Any]:
    prompt = sum(one.prompt_tokens for one in turns)
    cached = sum(one.cached_tokens for one in turns)
    return {
        "requests": len(turns),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "cached_share": cached / prompt,
        "output_tokens": sum(one.output_tokens for one in turns),
        "ttft_s": percentiles([one.ttft_s for one in turns]),
    }


async def _run_agents(base: str, agents: int, turns: int, system_tokens: int, seed: int) -> list[Turn]:
    system = await _system_prompt(base, system_tokens)
    begin = arrival_times("poisson", agents, AGENTS_PER_SECOND, seed)
    each = await asyncio.gather(*(_agent(base, number, at, system, turns) for number, at in enumerate(begin)))
    return [turn for turns_of_one in each for turn in turns_of_one]


async def _system_prompt(base: str, tokens: int) -> str:
    """Rules of a house, about as many tokens as asked for."""
    rules = "\n".join(
        f"Rule {i}: when a guest asks about {TOPICS[i % len(TOPICS)]}, look it up in part {i * 37 % 101} of the guide, "
        f"and never promise more than it says." for i in range(1, 2 + tokens // 10)
    )  # fmt: skip
    async with httpx.AsyncClient(base_url=base, timeout=60) as client:
        whole = await client.post("/tokenize", json={"prompt": rules, "add_special_tokens": False})
        cut = await client.post("/detokenize", json={"tokens": whole.json()["tokens"][:tokens]})
    text: str = cut.json()["prompt"]
    return text


async def _agent(base: str, number: int, begin: float, system: str, turns: int) -> list[Turn]:
    await asyncio.sleep(begin)
    question = f"I am guest {number}. What should I know about {TOPICS[number % len(TOPICS)]}?"
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": system},
        {"role": "user", "content": question},
    ]
    found = []
    for turn in range(1, turns + 1):
        calls = turn < turns
        asked = {
            "messages": messages,
            "tools": [TOOL],
            "tool_choice": "required" if calls else "auto",
            "parallel_tool_calls": False,
            "max_completion_tokens": None if calls else ANSWER,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        measured, message = await _ask(base, asked, turn)
        found.append(measured)
        messages.append(message)
        for call in message.get("tool_calls", ()):
            result = (
                f"Part {number * 7 + turn} of the guide says: open from {turn + 7} to {turn + 15} o'clock."
            )
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return found


async def _ask(base: str, asked: dict[str, Any], turn: int) -> tuple[Turn, dict[str, Any]]:
    """One turn: what it cost, and the assistant's message as it goes into the next prompt."""
    start, first = time.perf_counter(), 0.0
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    usage: dict[str, Any] = {}
    async for event in events(base, "/v1/chat/completions", asked):
        first = first or time.perf_counter() - start
        usage = event["usage"] or usage
        for choice in event["choices"]:
            message["content"] += choice["delta"].get("content") or ""
            for piece in choice["delta"].get("tool_calls", ()):
                if "id" in piece:
                    message.setdefault("tool_calls", []).append(piece)
                else:
                    function = message["tool_calls"][piece["index"]]["function"]
                    function["arguments"] += piece["function"]["arguments"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Turn(turn, usage["prompt_tokens"], cached, usage["completion_tokens"], first), message
