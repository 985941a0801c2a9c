"""Five thousand requests, one server process: its memory must not grow with them."""

from __future__ import annotations

import asyncio

import httpx
import psutil
import pytest

from common.bench.job import Job
from common.bench.serve_process import server_arguments, server_process

REQUESTS, AT_ONCE, ROUNDS = 5000, 32, 5
TINY = Job("5", "tiny-llama", "float32", kv_bytes=512 << 10, max_model_len=128, kernel="reference")
MIB = 1 << 20


def body(number: int) -> tuple[str, dict]:
    """Chats and completions, streams and plain calls, a few tokens each; prompts that never come again."""
    more = {"max_tokens": 2, "temperature": number % 3 / 2, "stream": number % 2 == 0}
    if number % 4 < 2:
        return "/v1/completions", {"prompt": f"number {number}", "n": 1 + number % 2, **more}
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": f"{number}"}], **more}


async def send(client: httpx.AsyncClient, numbers: range) -> None:
    """So many at a time, each in its own worker's turn."""
    left = iter(numbers)

    async def work() -> None:
        for number in left:
            path, asked = body(number)
            answer = await client.post(path, json=asked)
            assert answer.status_code == 200, answer.text
            assert not asked["stream"] or answer.text.endswith("data: [DONE]\n\n")

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))


async def memory_over_requests(base: str, process: psutil.Process) -> list[float]:
    """Resident memory in MiB after each fifth of the requests."""
    found = []
    async with httpx.AsyncClient(base_url=base, timeout=60) as client:
        for number in range(ROUNDS):
            share = REQUESTS // ROUNDS
            await send(client, range(number * share, (number + 1) * share))
            found.append(process.memory_info().rss / MIB)
    return found


@pytest.mark.slow
@pytest.mark.timeout(230)
def test_memory_is_flat_over_five_thousand_requests():
    """The first thousand fill the caches; the four thousand after them may add next to nothing."""
    with server_process(*server_arguments(TINY)) as server:
        found = asyncio.run(memory_over_requests(server.base, psutil.Process(server.pid)))
    grown = found[-1] - found[0]
    assert grown < 6, f"MiB after each thousand requests: {[round(one, 1) for one in found]}"
