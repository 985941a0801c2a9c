"""What every HTTP request passes on its way in and out: an id, a line in the log, the key, the size.

Plain ASGI, around the whole application, so that error answers pass here too.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Iterable
from time import monotonic
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stage6_api.answering import SAFE_ID
from stage6_api.errors import ApiError, bad_request, overloaded
from stage6_api.http_metrics import UNCOUNTED, HttpMetrics

log = logging.getLogger("sixstage.access")

REQUEST_ID = "X-Request-Id"
OPEN_PATHS = (
    "/health",
    "/ping",
    "/version",
    "/metrics",
    "/load",
    "/docs",
    "/openapi.json",
    "/docs/oauth2-redirect",
    "/live",  # the page without its data
)
JSON_METHODS = ("POST", "PUT", "PATCH")


class RequestLog:
    """Names the request, counts it and writes one line when it is over; never a word of a prompt.

    The caller's X-Request-Id is kept if it is safe to put into headers and logs (128 plain characters).
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.metrics: HttpMetrics | None = None  # none until a model is there

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID) or ""
        named = SAFE_ID.fullmatch(given) is not None
        state = scope.setdefault("state", {})
        state |= {"request_id": given if named else uuid4().hex, "id_from_header": named, "facts": {}}
        seen = _Seen(scope, receive, send)
        try:
            await self.app(scope, seen.receive, seen.send)
        except Exception:
            # The application has already answered 500; to us it is news, to the client it is over.
            log.exception("request %s has failed", state["request_id"])
        finally:
            self._book(scope, seen)

    def _book(self, scope: Scope, seen: _Seen) -> None:
        handler = getattr(scope.get("route"), "path", "none")
        seconds = monotonic() - seen.started
        if self.metrics is not None:
            self.metrics.observe(scope["method"], handler, seen.status, seconds, seen.received, seen.sent)
        facts: dict[str, Any] = {"method": scope["method"], "path": handler, "status": seen.status}
        facts |= {"seconds": seconds, "id": scope["state"]["request_id"]} | scope["state"]["facts"]
        level = logging.DEBUG if handler in UNCOUNTED else logging.INFO
        log.log(level, " ".join(f"{name}={_short(value)}" for name, value in facts.items()))


def _short(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


class _Seen:
    """What passed through one request's two channels."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.started = monotonic()
        self.status = 499  # until an answer begins: a client that has left
        self.received = 0
        self.sent = 0
        self._scope, self._receive, self._send = scope, receive, send

    async def receive(self) -> Message:
        message = await self._receive()
        self.received += len(message.get("body", b""))
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)[REQUEST_ID] = self._scope["state"]["request_id"]
        self.sent += len(message.get("body", b""))
        await self._send(message)


class Guard:
    """Turns requests away before anything reads them: wrong key, wrong content type, too large, too early.

    Args:
        app: what is guarded.
        api_keys: any of them opens the door; without any it is open.
        max_body_bytes: most bytes of a body, announced or not.
    """

    def __init__(self, app: ASGIApp, api_keys: Iterable[str], max_body_bytes: int) -> None:
        self.app = app
        self._keys = [_digest(key) for key in api_keys]
        self._max_body_bytes = max_body_bytes
        self.ready = False  # set once there is a model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            self._check(scope)
            body = _Measured(receive, send, self._max_body_bytes)
            await self.app(scope, body.receive, body.send)
            if body.too_large:
                raise self._too_large()
        except ApiError as error:
            await error.response()(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers, path = Headers(scope=scope), scope["path"]
        if path not in OPEN_PATHS and scope["method"] != "OPTIONS":
            self._check_key(headers)
        if not self.ready and path not in ("/health", "/ping", "/version", "/live"):
            raise overloaded("The model is still being loaded.", retry_after=2)
        length = headers.get("content-length") or ""
        if length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > self._max_body_bytes):
            raise self._too_large()
        has_body = length not in ("", "0") or "transfer-encoding" in headers
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if has_body and scope["method"] in JSON_METHODS and kind != "application/json":
            raise bad_request("the content type must be application/json", "body")

    def _check_key(self, headers: Headers) -> None:
        """Compare digests, all of them and in constant time, so that time tells nothing about a key."""
        if not self._keys:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        offered = _digest(key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", ""))
        if sum(hmac.compare_digest(offered, known) for known in self._keys) == 0:  # no early end
            raise ApiError(
                401,
                "Incorrect API key provided. Send it as 'Authorization: Bearer <key>'.",
                "authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body is larger than {self._max_body_bytes} bytes.")


class _Measured:
    """A body whose length may not have been announced: too much of it, and nobody gets to answer."""

    def __init__(self, receive: Receive, send: Send, most: int) -> None:
        self.too_large = False
        self._left = most
        self._receive, self._send = receive, send

    async def receive(self) -> Message:
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            self.too_large = True
            return {"type": "http.disconnect"}  # whoever reads gives up here
        return message

    async def send(self, message: Message) -> None:
        if not self.too_large:
            await self._send(message)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
