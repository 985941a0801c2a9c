"""What one HTTP call waits for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from time import monotonic

from common.output import RequestOutput
from common.protocol import Request


class Job:
    """The requests of one HTTP call: admitted together, watched together, taken back together.

    Outputs are cumulative, so only the newest of each request is kept: a reader that is slow, or gone, holds
    one answer in memory and not a queue of them.
    """

    def __init__(self, requests: Seq[Request]) -> None:
        self.requests = list(requests)
        self.arrived = monotonic()
        self.first_token_at: float | None = None
        self._fresh: dict[int, RequestOutput] = {}
        self._open = set(range(len(self.requests)))
        self._error: Exception | None = None
        self._news = asyncio.Event()

    async def updates(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(which request, its output so far) whenever there is something new, until all have ended.

        Raises:
            ApiError: the engine failed, or the server ended.
        """
        while self._open or self._fresh:
            await self._news.wait()
            self._news.clear()
            fresh, self._fresh = self._fresh, {}
            for number in sorted(fresh):
                yield number, fresh[number]
            if self._error is not None:
                raise self._error

    async def results(self) -> list[RequestOutput]:
        """The last output of each request, in order."""
        last: dict[int, RequestOutput] = {}
        async for number, output in self.updates():
            last[number] = output
        return [last[number] for number in range(len(self.requests))]

    def put(self, number: int, output: RequestOutput) -> None:
        """Note a newer output."""
        self._fresh[number] = output
        if output.finished:
            self._open.discard(number)
        self._news.set()

    def fail(self, error: Exception) -> None:
        """Let whoever waits get this error; the first one counts."""
        self._error = self._error or error
        self._news.set()
