"""Conversations as counts of tokens: what agents do in tool turns, and what people did in real chats."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from importlib.resources import files

Turns = list[tuple[int, int]]
"""(new prompt tokens, answer tokens) of each turn of one conversation."""

AGENT_TURNS = 4
USERS = 16  # talk at once; when one's conversation is over, the next one begins


@dataclass(frozen=True)
class Talks:
    """Conversations in the order in which they begin.

    Attributes:
        conversations: each turn's prompt is the whole conversation so far, and what is new.
        system_len: tokens that all conversations begin with.
    """

    conversations: list[Turns]
    system_len: int = 0


def agent_talks(count: int, seed: int) -> Talks:
    """Agents with one system prompt of 1,000 tokens, four turns each; a turn brings a tool's result.

    24 to 72 new tokens (a result, a question) are answered by 16 to 48 (a call, a reply).
    """
    rng = random.Random(seed)
    agents = -(-count // AGENT_TURNS)
    return Talks(
        [[(rng.randint(24, 72), rng.randint(16, 48)) for _ in range(AGENT_TURNS)] for _ in range(agents)],
        system_len=1000,
    )


def chat_talks(count: int, seed: int) -> Talks:
    """The first `count` of 400 real conversations from ShareGPT, in an order shuffled by the seed."""
    with files("common.bench.data").joinpath("sharegpt_conversations.jsonl").open() as file:
        counts = [json.loads(line) for line in file]
    random.Random(seed).shuffle(counts)
    return Talks([list(zip(row[::2], row[1::2], strict=True)) for row in counts[:count]])
