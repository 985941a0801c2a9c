"""What chat and completions share on the way back: ids, usage, and cutting a growing answer into news."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from time import time
from typing import Any

from fastapi import Request as HttpRequest
from pydantic import BaseModel
from starlette.responses import Response

from common.output import CompletionOutput, RequestOutput
from common.protocol import Logprob
from stage6_api.job import Job
from stage6_api.logprobs import Spelling
from stage6_api.schemas import SamplingFields
from stage6_api.schemas_answers import ErrorBody, PromptDetails, Usage
from stage6_api.served import Served
from stage6_api.sse import until_disconnect

CLIENT_GONE = 499  # nginx's word for it; only the log will see it
SAFE_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in {
        400: "A field is malformed, out of range or not supported.",
        401: "No valid API key.",
        404: "No such model.",
        413: "The body is too large.",
        500: "The engine has failed.",
        503: "The queue is full, or the server is starting or ending; see Retry-After.",
    }.items()
}


@dataclass(frozen=True)
class Call:
    """One HTTP call under way: what its answer is called, and the requests that work for it.

    Attributes:
        id: of the answer, such as "chatcmpl-...".
        created: Unix seconds.
        usage_at_end, usage_always: whether a stream ends with the usage, or carries it in every chunk.
    """

    served: Served
    body: Any
    http: HttpRequest
    job: Job
    id: str
    created: int
    spelling: Spelling
    usage_at_end: bool
    usage_always: bool

    @classmethod
    def begin(cls, prefix: str, served: Served, body: SamplingFields, http: HttpRequest, job: Job) -> Call:
        """Name the answer after the request's id."""
        options = body.stream_options
        asked = ("stream", "n", "temperature", "top_p", "seed")
        http.state.facts |= {name: getattr(body, name) for name in asked if getattr(body, name) is not None}
        http.state.facts["max_tokens"] = job.requests[0].params.max_tokens
        forced = served.settings.force_include_usage
        always = forced or bool(options and options.continuous_usage_stats and options.include_usage)
        return cls(
            served=served,
            body=body,
            http=http,
            job=job,
            id=f"{prefix}-{name_request(http, body.request_id)}",
            created=int(time()),
            spelling=Spelling(served.tokenizer, bool(body.return_tokens_as_token_ids)),
            usage_at_end=forced or bool(options and options.include_usage),
            usage_always=always,
        )

    def head(self, kind: str) -> dict[str, Any]:
        """The fields that every chunk and every answer begins with."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.served.name}

    @property
    def text_only(self) -> bool:
        """Whether the chunks between a stream's first and last carry nothing but text."""
        scored = self.body.logprobs is not None and self.body.logprobs is not False
        return not (scored or self.body.return_token_ids or self.usage_always)

    def usage_field(self, outputs: Iterable[RequestOutput]) -> dict[str, Any]:
        """`usage` of a chunk that is not the last: null where one is promised, else left out."""
        if self.usage_always:
            return {"usage": usage(outputs)}
        return {"usage": None} if self.usage_at_end else {}

    def release(self) -> None:
        """The call is over: note what it cost, and take back what has not ended."""
        self.served.engine.release(self.job)
        note = self.http.state.facts
        if self.job.first_token_at is not None:
            note["ttft"] = self.job.first_token_at - self.job.arrived

    def note(self, outputs: Iterable[RequestOutput]) -> None:
        """Facts for the access log: numbers and reasons, never text."""
        outputs = list(outputs)
        answers = [answer for output in outputs for answer in output.outputs]
        counted = usage(outputs)
        self.http.state.facts |= {
            "prompt_tokens": counted.prompt_tokens,
            "cached_tokens": counted.prompt_tokens_details.cached_tokens,
            "output_tokens": counted.completion_tokens,
            "finish": ",".join(sorted({answer.finish_reason or "-" for answer in answers})),
        }

    async def results(self) -> list[RequestOutput] | None:
        """All answers when they have ended; None if the client has left before.

        The handler of a plain call never touches the socket, so somebody must watch it.
        """
        leaving = asyncio.ensure_future(until_disconnect(self.http.receive))
        results = asyncio.ensure_future(self.job.results())
        try:
            await asyncio.wait({leaving, results}, return_when=asyncio.FIRST_COMPLETED)
            if not results.done():
                return None
            outputs = results.result()
            self.note(outputs)
            return outputs
        finally:
            self.release()
            for task in (leaving, results):
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task


def name_request(http: HttpRequest, asked: str | None) -> str:
    """The public id of a request: the client's header, else its field, else ours."""
    state = http.state
    if not state.id_from_header and asked and SAFE_ID.fullmatch(asked):
        state.request_id = asked
    name: str = state.request_id
    return name


def json_answer(answer: BaseModel) -> Response:
    """An answer as JSON."""
    return Response(answer.model_dump_json(exclude_unset=True), media_type="application/json")


def client_gone() -> Response:
    """An answer that nobody will read."""
    return Response(status_code=CLIENT_GONE)


def usage(outputs: Iterable[RequestOutput]) -> Usage:
    """Tokens of all prompts, each once, and of all answers, the stop token included."""
    outputs = list(outputs)
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptDetails(cached_tokens=cached),
    )


class Progress:
    """One answer of a stream: its outputs are cumulative, the client gets what is new.

    Tokens and their log probabilities wait here until there is text to send them with (half a character, or
    what may become a stop string, is no text yet), so no chunk is empty and none is lost.
    """

    def __init__(self) -> None:
        self.ended = False
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] = []
        self._text = 0
        self._tokens = 0

    def take(self, answer: CompletionOutput) -> str:
        """Note a newer output of the answer; the text that is new."""
        text = answer.text[self._text :]
        self.token_ids += answer.token_ids[self._tokens :]
        if answer.logprobs is not None:
            self.logprobs += answer.logprobs[self._tokens :]
        self._text, self._tokens = len(answer.text), len(answer.token_ids)
        self.ended = answer.finished
        return text

    def pop(self) -> tuple[list[int], list[dict[int, Logprob]]]:
        """Tokens and log probabilities that wait; they are gone afterwards."""
        waiting = self.token_ids, self.logprobs
        self.token_ids, self.logprobs = [], []
        return waiting
