"""`POST /v1/responses`: the stateless subset, translated to chat.  Nothing is stored, so nothing can be fetched."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from common.output import RequestOutput
from stage6_api.answering import ERRORS, Progress, client_gone, usage
from stage6_api.chat import Chat, begin
from stage6_api.chat_choice import AnswerReader
from stage6_api.errors import ApiError
from stage6_api.logprobs import chat_logprobs
from stage6_api.responses_input import not_stored, to_chat
from stage6_api.responses_output import Event, ResponseBuilder
from stage6_api.schemas import ResponsesRequest
from stage6_api.schemas_responses import ResponseObject
from stage6_api.sse import EventStream, named_frame

router = APIRouter()
log = logging.getLogger("sixstage.http")


@router.post("/v1/responses", response_model=ResponseObject, responses=ERRORS)
async def responses(body: ResponsesRequest, request: Request) -> Response:
    """Answer an input, or the items of a conversation."""
    chat = await begin(request.app.state.served, to_chat(body), request, "resp")
    answer = _Answer(chat, body)
    if body.stream:
        keep_alive = chat.call.served.settings.keep_alive_seconds
        return EventStream(_frames(answer), chat.call.release, keep_alive)
    outputs = await chat.call.results()
    if outputs is None:
        return client_gone()
    for _ in answer.news(outputs[0]):
        pass  # the events of a stream; here only what they add up to is sent
    return JSONResponse(answer.builder.response)


@router.get("/v1/responses/{response_id}", responses={404: ERRORS[404]})
async def retrieve(response_id: str) -> ResponseObject:
    """Always a 404."""
    raise not_stored(response_id)


@router.post("/v1/responses/{response_id}/cancel", responses={404: ERRORS[404]})
async def cancel(response_id: str) -> ResponseObject:
    """Always a 404; to cancel, close the connection."""
    raise not_stored(response_id)


async def _frames(answer: _Answer) -> AsyncIterator[bytes]:
    """The events; there is no [DONE]."""
    try:
        for event in answer.builder.begin():
            yield named_frame(event)
        async for _, output in answer.chat.call.job.updates():
            for event in answer.news(output):
                yield named_frame(event)
    except ApiError as error:
        yield named_frame(answer.builder.error(error.body["error"]))
    except Exception:
        log.exception("a stream has failed")
        yield named_frame(answer.builder.error(ApiError(500, "Internal server error.").body["error"]))


class _Answer:
    """One answer on its way from outputs to events."""

    def __init__(self, chat: Chat, body: ResponsesRequest) -> None:
        self.chat = chat
        self.builder = ResponseBuilder(_response(chat, body))
        self._progress = Progress()
        self._reader = AnswerReader(chat.plan)

    def news(self, output: RequestOutput) -> Iterable[Event]:
        """What a newer output adds."""
        [answer] = output.outputs
        text = self._progress.take(answer)
        for event in self._reader.events(text, answer.finished):
            yield from self.builder.take(event, self._scores())
        if answer.finished:
            self.chat.call.note([output])
            yield from self.builder.end(answer.finish_reason or "", _usage(output), self._scores())

    def _scores(self) -> list[Any]:
        """Scores of the tokens that have come since the last event, as chat writes them."""
        token_ids, scores = self._progress.pop()
        body = self.chat.call.body
        if not body.logprobs:
            return []
        found = chat_logprobs(token_ids, scores, body.top_logprobs or 0, self.chat.call.spelling)
        return [entry.model_dump() for entry in found.content or ()]


def _response(chat: Chat, body: ResponsesRequest) -> dict[str, Any]:
    """A response without output yet; it repeats what was asked for, defaults filled in."""
    call = chat.call
    return {
        "id": call.id,
        "object": "response",
        "created_at": call.created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": call.served.name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or ("auto" if body.tools else "none"),
        "tools": body.tools or [],
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "metadata": (body.model_extra or {}).get("metadata") or {},
        "usage": None,
    }


def _usage(output: RequestOutput) -> dict[str, Any]:
    counted = usage([output])
    return {
        "input_tokens": counted.prompt_tokens,
        "input_tokens_details": {"cached_tokens": counted.prompt_tokens_details.cached_tokens},
        "output_tokens": counted.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counted.total_tokens,
    }
