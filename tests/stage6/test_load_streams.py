"""Many users at once on loopback: whole answers, the same as offline, and nothing left behind."""

from __future__ import annotations

import asyncio
import random
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import httpx
import openai
import pytest
from support.invariants import check_drained
from support.listening import listening
from support.waiting import wait_for

from common.generate import LLM
from common.sampling_params import SamplingParams
from common.stages import find_stage
from stage6_api.served import Served, Settings
from stage6_api.server import Application

pytestmark = pytest.mark.slow
TINY = {"model": "tiny-llama", "dtype": "float32", "kernel": "reference", "max_model_len": 256, "block_size": 4,
        "max_num_batched_tokens": 256}  # fmt: skip
TINY_KV = (
    700 * 512
)  # bytes: a dozen of the conversations below, so that hundreds queue and some are preempted
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "saw",
    "how",
    "rain",
    "fell",
    "over",
    "hills",
    "all",
    "day",
]


@dataclass(frozen=True)
class Asked:
    """One chat: what is asked, and how tokens are drawn."""

    text: str
    max_tokens: int
    temperature: float
    seed: int

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.text}]

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, seed=self.seed, max_tokens=self.max_tokens)

    @property
    def body(self) -> dict:
        return {"model": "tiny", "messages": self.messages, "temperature": self.temperature, "seed": self.seed,
                "max_completion_tokens": self.max_tokens, "stream": True,
                "stream_options": {"include_usage": True}}  # fmt: skip


def many(count: int, longest: int, seed: int = 0) -> list[Asked]:
    """Chats of different lengths; every second one is greedy, the others draw by their own seed."""
    rng = random.Random(seed)
    return [
        Asked(" ".join(rng.choices(WORDS, k=rng.randint(1, 12))), rng.randint(1, longest), 0.8 * (i % 2), i)
        for i in range(count)
    ]


@contextmanager
def serving(llm: LLM):
    """The engine of this `LLM` behind a socket; the URL, with /v1."""
    settings = Settings(served_model_names=("tiny",))
    served = Served(llm.engine, llm.tokenizer, llm.stage, settings)
    with listening(Application(settings, served)) as base:
        yield f"{base}/v1"
        wait_for(lambda: not served.engine.num_live_jobs and not llm.engine.has_unfinished())
        check_drained(llm.engine)


async def read(client: openai.AsyncOpenAI, asked: Asked) -> tuple[str, str, int]:
    """(text, finish reason, tokens) of a stream read to its end."""
    text, reasons, usage = "", [], None
    async for chunk in await client.chat.completions.create(**asked.body):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    [reason] = reasons
    return text, reason, usage.completion_tokens


async def read_all(base: str, chats: list[Asked]) -> list[tuple[str, str, int]]:
    """All at the same time."""
    async with openai.AsyncOpenAI(base_url=base, api_key="EMPTY", timeout=200, max_retries=0) as client:
        return await asyncio.gather(*(read(client, asked) for asked in chats))


def offline(llm: LLM, chats: list[Asked]) -> list[tuple[str, str, int]]:
    """What the same model answers without a server."""
    outputs = llm.chat([c.messages for c in chats], [c.params for c in chats], use_tqdm=False)
    return [(o.outputs[0].text, o.outputs[0].finish_reason, len(o.outputs[0].token_ids)) for o in outputs]


@pytest.mark.timeout(200)
def test_two_hundred_streams():
    """Far more than fit into the batch, or into the memory, at a time."""
    chats = many(200, longest=24)
    expected = offline(LLM(**TINY, kv_bytes=8 << 20, max_num_seqs=32), chats)
    assert len({text for text, _, _ in expected}) > 150
    llm = LLM(**TINY, kv_bytes=TINY_KV, max_num_seqs=64)
    with serving(llm) as base:
        assert asyncio.run(read_all(base, chats)) == expected
    assert llm.engine.stats.preemptions > 0


async def leave_early(client: httpx.AsyncClient, asked: Asked, after: float | int) -> None:
    """Read so many chunks and hang up; a fraction is a time in seconds, mostly before any answer."""
    if isinstance(after, float):
        with suppress(httpx.TimeoutException):  # a fast machine may have answered by then
            await client.post("/chat/completions", json={**asked.body, "stream": after > 0.05}, timeout=after)
        return
    async with client.stream("POST", "/chat/completions", json=asked.body) as answer:
        seen = 0
        async for line in answer.aiter_lines():
            seen += line.startswith("data: ")
            if seen > after:
                return


async def stay_or_leave(base: str, chats: list[Asked], leaving: list[Asked]) -> list[tuple[str, str, int]]:
    """Some read to the end while others come and leave at random."""
    rng = random.Random(1)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=base, timeout=100, limits=limits) as client:
        patience = [rng.choice([0.02, 0.1, 1, 2, 5, 20]) for _ in leaving]
        left = [leave_early(client, asked, after) for asked, after in zip(leaving, patience, strict=True)]
        read, *_ = await asyncio.gather(read_all(base, chats), *left)
    return read


@pytest.mark.timeout(200)
def test_random_disconnects_leak_nothing():
    """Before the first token, in the queue, in the middle: every block comes back, and nobody else is disturbed."""
    chats = many(40, longest=40)
    leaving = [Asked(asked.text, 200, 0.8, 1000 + i) for i, asked in enumerate(many(160, 40, seed=2))]
    expected = offline(LLM(**TINY, kv_bytes=8 << 20, max_num_seqs=8), chats)
    llm = LLM(**TINY, kv_bytes=TINY_KV, max_num_seqs=32)
    with serving(llm) as base:
        assert asyncio.run(stay_or_leave(base, chats, leaving)) == expected
    pool = llm.engine.kv.blocks.pool
    cached = sum(block in pool.hash_of for block in pool.free_blocks)
    empty = sum(block not in pool.hash_of for block in pool.free_blocks)
    assert empty + cached == pool.num_blocks
    assert cached > 0


@pytest.mark.model135
@pytest.mark.timeout(300)
def test_sixteen_streams_of_the_real_model():
    """In float32, where what else is in the batch cannot change an answer."""
    options = {"dtype": "float32", "max_model_len": 512, "kv_bytes": 128 << 20}
    chats = many(16, longest=16)
    llm = LLM(**options, max_num_seqs=4)
    expected = offline(llm, chats)
    llm.engine = find_stage(llm.stage)[1].resolve()(llm.model, replace(llm.config, max_num_seqs=16))
    with serving(llm) as base:
        assert asyncio.run(read_all(base, chats)) == expected
