"""The application: endpoints, error shape, CORS, guard and log, put together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.types import ASGIApp

from stage6_api import chat, completions, info, live, responses
from stage6_api.errors import install_handlers
from stage6_api.http_metrics import HttpMetrics
from stage6_api.middleware import REQUEST_ID, Guard, RequestLog
from stage6_api.schemas_answers import ChatCompletionChunk, Completion
from stage6_api.schemas_responses import ResponseEvent
from stage6_api.served import Served, Settings

SSE_SCHEMAS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionChunk,
    "/v1/completions": Completion,
    "/v1/responses": ResponseEvent,
}


class Application:
    """An ASGI application that can be there before its model is.

    Args:
        settings: the operator's choices.
        served: the model, if there is one already.
    """

    def __init__(self, settings: Settings, served: Served | None = None) -> None:
        self.api = _make_api()
        if settings.live:
            self.api.include_router(live.router)
        self._guard = Guard(self.api, settings.api_keys, settings.max_body_bytes)
        self._log = RequestLog(_with_cors(self._guard, settings))
        self.api.router.lifespan_context = self._lifespan
        self._waiting = served

    @property
    def served(self) -> Served | None:
        """The model, once there is one."""
        served: Served | None = self.api.state.served
        return served

    def serve(self, served: Served) -> None:
        """Open the doors; to be called on the event loop."""
        served.engine.start()
        self.api.state.served = served
        if served.settings.live:
            self.api.state.live = live.make_view(served)
        self._log.metrics = HttpMetrics(served.metrics.registry)
        self._guard.ready = True

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See ASGI."""
        await self._log(scope, receive, send)

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        if self._waiting is not None:
            self.serve(self._waiting)
        yield
        if self.served is not None:
            self.served.engine.stop()


def _with_cors(app: ASGIApp, settings: Settings) -> ASGIApp:
    """Outside the guard, so that a browser may read why it was turned away; without origins, nothing."""
    if not settings.allowed_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=settings.allowed_origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=[REQUEST_ID],
    )


def _make_api() -> FastAPI:
    api = FastAPI(title="sixstage", version=version("sixstage"), description="Stage 6: the OpenAI API.")
    api.state.served = None
    install_handlers(api)
    for part in (chat, completions, responses, info):
        api.include_router(part.router)
    api.openapi = lambda: _openapi(api)  # type: ignore[method-assign]
    return api


def _openapi(api: FastAPI) -> dict[str, Any]:
    """The OpenAPI document: a stream's events beside the plain answer, and no 422, which is never sent."""
    if api.openapi_schema is None:
        document = get_openapi(
            title=api.title, version=api.version, description=api.description, routes=api.routes
        )
        schemas = document["components"]["schemas"]
        for path, model in SSE_SCHEMAS.items():
            schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(schema.pop("$defs", {}))
            schemas[model.__name__] = schema
            content = document["paths"][path]["post"]["responses"]["200"]["content"]
            content["text/event-stream"] = {"itemSchema": _event_schema(model.__name__)}
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        api.openapi_schema = document
    return api.openapi_schema


def _event_schema(model: str) -> dict[str, Any]:
    """One server-sent event, in OpenAPI's words: JSON of a chunk or of an error in its data, or the end mark."""
    chunk = {"anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in (model, "ErrorBody")]}
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": chunk}
    return {
        "type": "object",
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}, "event": {"type": "string"}},
        "required": ["data"],
    }
