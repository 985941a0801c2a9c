"""Server-sent events: the frames, and what must happen when either side ends early."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.errors import InvalidValue
from stage6_api.errors import ApiError, invalid_value

log = logging.getLogger("sixstage.http")

TEXT = "\x00text\x00"  # stands for the text in the chunk that `TextFrames` are made after
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # or a proxy collects the whole stream first
}


def data_frame(event: BaseModel) -> bytes:
    """One event: a line of JSON and an empty line (a single newline makes clients see nothing)."""
    return f"data: {event.model_dump_json(exclude_unset=True)}\n\n".encode()


def named_frame(event: Mapping[str, object]) -> bytes:
    """An event of the Responses API: its type stands above its data."""
    return f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n".encode()


def error_frame(error: ApiError) -> bytes:
    """An error after the 200 has gone out; nested, as clients take a flat one for the end of the answer."""
    return f"data: {json.dumps(error.body, ensure_ascii=False)}\n\n".encode()


class TextFrames:
    """Frames of chunks that differ in nothing but their text: all around it is checked and encoded once.

    Args:
        chunk: one of them, with `TEXT` in the place of its text.
    """

    def __init__(self, chunk: BaseModel) -> None:
        self._before, self._after = data_frame(chunk).split(to_json(TEXT))

    def frame(self, text: str) -> bytes:
        """The same as `data_frame` of the chunk with this text, for a fortieth of the time."""
        return self._before + to_json(text) + self._after


async def frames(chunks: AsyncIterator[BaseModel | bytes]) -> AsyncIterator[bytes]:
    """Chunks as frames (bytes are one already); an error becomes the last event, and [DONE] always comes."""
    try:
        async for chunk in chunks:
            yield chunk if isinstance(chunk, bytes) else data_frame(chunk)
    except ApiError as error:
        yield error_frame(error)
    except InvalidValue as error:
        yield error_frame(invalid_value(error))
    except Exception:
        log.exception("a stream has failed")
        yield error_frame(ApiError(500, "Internal server error."))
    yield DONE


class EventStream(Response):
    """Sends frames until they end or the client leaves; then `release` is called, whatever happened.

    Not Starlette's StreamingResponse: that one leaves a generator which waits for a slow client to the
    garbage collector, and the engine would go on computing for nobody until then.

    Args:
        body: frames.
        release: called once, at the end.
        keep_alive: a comment line is sent after this to twice this many seconds of silence; 0 for never.
    """

    def __init__(
        self, body: AsyncIterator[bytes], release: Callable[[], None], keep_alive: float = 0.0
    ) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
        self._body = body
        self._release = release
        self._keep_alive = keep_alive
        self._silent = False  # no frame since the last look
        self._open = False  # between the first and the last message

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; see ASGI."""
        leaving = asyncio.ensure_future(until_disconnect(receive))
        sending = asyncio.ensure_future(self._send_all(send))
        commenting = asyncio.ensure_future(self._comment_on_silence(send))
        try:
            await asyncio.wait({leaving, sending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._release()
            for task in (commenting, leaving, sending):
                task.cancel()
                with suppress(asyncio.CancelledError, OSError):
                    await task

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self._open = True
        async for frame in self._body:
            self._silent = False
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        self._open = False
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _comment_on_silence(self, send: Send) -> None:
        """A comment line after each stretch of silence; costs the frames nothing."""
        while self._keep_alive:
            self._silent = True
            await asyncio.sleep(self._keep_alive)
            if self._silent and self._open:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})


async def until_disconnect(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
