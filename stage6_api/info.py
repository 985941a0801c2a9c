"""Everything that is not an answer: models, tokens, health, load, metrics."""

from __future__ import annotations

import asyncio
from importlib.metadata import version as installed_version

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.responses import PlainTextResponse, Response

from stage6_api.answering import ERRORS
from stage6_api.errors import ApiError, bad_request
from stage6_api.logprobs import Spelling
from stage6_api.prompts import template_ids
from stage6_api.schemas import DetokenizeRequest, TokenizeRequest
from stage6_api.schemas_answers import Detokenized, Load, Model, ModelList, Tokenized, Version
from stage6_api.served import Served
from stage6_api.tools import plan_tools

router = APIRouter()
_STATES: dict[int | str, dict[str, object]] = {503: {"description": "Starting, ending or failed."}}


@router.get("/v1/models", responses={401: ERRORS[401]})
async def list_models(request: Request) -> ModelList:
    """Every name that the model is served under."""
    served: Served = request.app.state.served
    names = served.settings.served_model_names
    return ModelList(object="list", data=[_model(served, name) for name in names])


@router.get("/v1/models/{name:path}", responses={code: ERRORS[code] for code in (401, 404)})
async def retrieve_model(name: str, request: Request) -> Model:
    """One of them; a name may contain slashes."""
    served: Served = request.app.state.served
    served.check_model(name)
    return _model(served, name)


def _model(served: Served, name: str) -> Model:
    return Model(
        id=name,
        object="model",
        created=served.created,
        owned_by="sixstage",
        root=served.name,
        parent=None,
        max_model_len=served.max_len,
    )


@router.post("/tokenize", responses={code: ERRORS[code] for code in (400, 401, 404, 413)})
async def tokenize(body: TokenizeRequest, request: Request) -> Tokenized:
    """The token ids that a text, or a conversation as chat would run it, becomes."""
    served: Served = request.app.state.served
    served.check_model(body.model)
    token_ids = await asyncio.to_thread(_token_ids, served, body)
    spelling = Spelling(served.tokenizer)
    return Tokenized(
        count=len(token_ids),
        max_model_len=served.max_len,
        tokens=token_ids,
        token_strs=[spelling.text(token) for token in token_ids] if body.return_token_strs else None,
    )


def _token_ids(served: Served, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("exactly one of prompt and messages is needed", "prompt")
    if body.prompt is not None:
        return served.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    plan = plan_tools(body.tools, None, True, False, served.settings.tool_call_parser)
    return template_ids(served, body, plan)


@router.post("/detokenize", responses={code: ERRORS[code] for code in (400, 401, 404, 413)})
async def detokenize(body: DetokenizeRequest, request: Request) -> Detokenized:
    """The text of token ids, special tokens included."""
    served: Served = request.app.state.served
    served.check_model(body.model)
    if any(token >= served.vocab_size for token in body.tokens):
        raise bad_request(f"tokens: allowed are token ids from 0 to {served.vocab_size - 1}", "tokens")
    text = await asyncio.to_thread(served.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return Detokenized(prompt=text)


@router.get("/health", responses=_STATES, response_class=Response)
@router.get("/ping", responses=_STATES, response_class=Response)
@router.post("/ping", responses=_STATES, response_class=Response)
async def health(request: Request) -> Response:
    """200 while new requests are taken, else 503; no body."""
    served: Served | None = request.app.state.served
    try:
        if served is not None:
            served.engine.check_ready()
    except ApiError:
        served = None
    return Response(status_code=503 if served is None else 200)


@router.get("/version")
async def version() -> Version:
    """The server's version."""
    return Version(version=installed_version("sixstage"))


@router.get("/load")
async def load(request: Request) -> Load:
    """How many HTTP calls the engine is working for."""
    return Load(server_load=request.app.state.served.engine.num_live_jobs)


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """All counters, for Prometheus."""
    text = generate_latest(request.app.state.served.metrics.registry)
    return Response(text, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})
