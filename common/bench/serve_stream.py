"""A stream of a server's events, read with as little work as will do.

The client shares the machine with the server that it measures, so the time it takes per token counts against the
server: with httpx about 150 µs, more than the server itself needs for it.  These few lines take a third of that.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from common.errors import SixstageError

Event = dict[str, Any]


async def events(base: str, path: str, asked: dict[str, Any]) -> AsyncIterator[Event]:
    """The events of a stream up to [DONE].

    Args:
        base: the server's URL, without /v1.
        path: of the endpoint.
        asked: the body of the request.

    Raises:
        SixstageError: the server refused, or the stream brought an error or broke off.
    """
    address = urlsplit(base)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(_request(address.netloc, path, json.dumps(asked).encode()))
        status = int((await reader.readuntil(b"\r\n\r\n")).split(None, 2)[1])
        if status != 200:
            raise SixstageError(f"the server answered {status}: {(await reader.read()).decode()}")
        while (data := _data(await reader.readuntil(b"\n\n"))) != b"[DONE]\n\n":
            if data:  # else it was a comment
                yield _event(data)
    except asyncio.IncompleteReadError as error:
        raise SixstageError("the stream broke off") from error
    finally:
        writer.close()


def _request(host: str, path: str, body: bytes) -> bytes:
    """In HTTP/1.0, whose answers end with the connection."""
    head = (f"POST {path} HTTP/1.0", f"Host: {host}", "Content-Type: application/json",
            f"Content-Length: {len(body)}", "", "")  # fmt: skip
    return "\r\n".join(head).encode() + body


def _data(frame: bytes) -> bytes:
    """Of an event; what stands before it is the size of a chunk, which some servers send nevertheless."""
    return frame.partition(b"data: ")[2]


def _event(data: bytes) -> Event:
    event: Event = json.loads(data)
    if "error" in event:
        raise SixstageError(f"the stream ended with an error: {event['error']['message']}")
    return event
