"""`POST /v1/completions`: one or many prompts, text or token ids, `n` answers each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from functools import cached_property
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from common.output import CompletionOutput, RequestOutput
from stage6_api.answering import ERRORS, Call, Progress, client_gone, json_answer, usage
from stage6_api.logprobs import CompletionScores, prompt_logprobs
from stage6_api.params import (
    PRIORITY_HEADER,
    Wanted,
    asked_max_tokens,
    check_fields,
    compile_grammar,
    engine_requests,
    read_priority,
)
from stage6_api.prompts import completion_prompts
from stage6_api.schemas import CompletionRequest
from stage6_api.schemas_answers import Completion, CompletionChoice
from stage6_api.served import Served
from stage6_api.sse import TEXT, EventStream, TextFrames, frames
from stage6_api.tools_grammar import asked_grammar

router = APIRouter()
DEFAULT_MAX_TOKENS = 16


@router.post("/v1/completions", response_model=Completion, responses=ERRORS)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue one or many texts."""
    call = await _begin(request.app.state.served, body, request)
    if body.stream:
        keep_alive = call.served.settings.keep_alive_seconds
        return EventStream(frames(_stream(call)), call.release, keep_alive)
    outputs = await call.results()
    return client_gone() if outputs is None else json_answer(_answer(call, outputs))


async def _begin(served: Served, body: CompletionRequest, http: Request) -> Call:
    """Check everything, make token ids off the event loop, and let the requests in."""
    served.engine.check_ready()
    check_fields(served, body)
    # With 0, one token is computed and dropped: the prompt's scores need a forward anyway.
    echo_only = body.max_tokens == 0 and body.echo
    most = 1 if echo_only else asked_max_tokens(served, body, "max_tokens")
    scored = [
        count for count in (body.prompt_logprobs, body.logprobs if body.echo else None) if count is not None
    ]
    wanted = Wanted(
        max_tokens=DEFAULT_MAX_TOKENS if most is None else most,
        logprobs=body.logprobs,
        prompt_logprobs=-1 if -1 in scored else max(scored, default=None),
        grammar=await compile_grammar(served, asked_grammar(body.response_format, body.structured_outputs)),
        skip_special_tokens=body.skip_special_tokens is not False,
        priority=read_priority(served, body, http.headers.get(PRIORITY_HEADER)),
    )
    prompts = await asyncio.to_thread(completion_prompts, served, body)
    requests = engine_requests(served, body, prompts, wanted)
    job = served.submit(requests, [prompt.text for prompt in prompts], stream=bool(body.stream))
    return Call.begin("cmpl", served, body, http, job)


def _answer(call: Call, outputs: list[RequestOutput]) -> Completion:
    """The whole answer: choice number prompt * n + sample."""
    outputs = [_without_answer(output) if call.body.max_tokens == 0 else output for output in outputs]
    choices = []
    for number, output in enumerate(outputs):
        for answer in output.outputs:
            choice = _Choice(call, output, number, answer.index)
            news = choice.news(output, answer)
            assert isinstance(news, CompletionChoice), "an answer that has ended has more news than text"
            if call.body.prompt_logprobs is not None:
                news.prompt_logprobs = prompt_logprobs(output.prompt_logprobs, call.spelling)
            choices.append(news)
    return Completion(
        **call.head("text_completion"),
        choices=choices,
        usage=usage(outputs),
        system_fingerprint=call.served.fingerprint,
    )


def _without_answer(output: RequestOutput) -> RequestOutput:
    """For `max_tokens` 0: the prompt alone."""
    empty = [CompletionOutput(a.index, "", [], None, a.logprobs and [], "length") for a in output.outputs]
    return RequestOutput(
        output.request_id, output.prompt, output.prompt_token_ids, output.prompt_logprobs, empty, True,
        output.counters,
    )  # fmt: skip


async def _stream(call: Call) -> AsyncIterator[Completion | bytes]:
    """One choice per chunk; the last text of an answer and its reason come together."""
    choices: dict[tuple[int, int], _Choice] = {}
    latest: dict[int, RequestOutput] = {}
    async for number, output in call.job.updates():
        if call.body.max_tokens == 0:
            output = _without_answer(output)  # noqa: PLW2901
        latest[number] = output
        for answer in output.outputs:
            if (number, answer.index) not in choices:
                choices[number, answer.index] = _Choice(call, output, number, answer.index)
            choice = choices[number, answer.index]
            news = choice.news(output, answer)
            if isinstance(news, str):
                yield choice.texts.frame(news)
            elif news is not None:
                yield _chunk(call, news, latest.values())
    call.note(latest.values())
    if call.usage_at_end:
        yield Completion(
            **call.head("text_completion"),
            choices=[],
            usage=usage(latest.values()),
            system_fingerprint=call.served.fingerprint,
        )


def _chunk(call: Call, news: CompletionChoice, outputs: Iterable[RequestOutput]) -> Completion:
    return Completion(**call.head("text_completion"), choices=[news], **call.usage_field(outputs))


class _Choice:
    """One answer on its way to the client, the echoed prompt in front of it."""

    def __init__(self, call: Call, output: RequestOutput, number: int, index: int) -> None:
        self._call = call
        self._index = number * len(output.outputs) + index
        self._progress = Progress()
        self._scores = CompletionScores(call.spelling)
        self._begun = False
        self._over = False

    @cached_property
    def texts(self) -> TextFrames:
        """Chunks with nothing but text."""
        bare = CompletionChoice(
            index=self._index, text=TEXT, logprobs=None, finish_reason=None, stop_reason=None
        )
        return TextFrames(_chunk(self._call, bare, ()))

    def news(self, output: RequestOutput, answer: CompletionOutput) -> CompletionChoice | str | None:
        """What is new: plain text if there is nothing beside it, None if that is nothing that could be sent."""
        if self._over or not (answer.token_ids or answer.finished):
            return None
        body, first = self._call.body, not self._begun
        text = self._progress.take(answer)
        if first and body.echo:
            text = self._prompt_text(output) + text
        if not text and not answer.finished:
            return None
        self._begun, self._over = True, answer.finished
        token_ids, scores = self._progress.pop()
        if self._call.text_only and not answer.finished:
            return text
        extra: dict[str, Any] = {}
        if body.return_token_ids:
            extra = {"token_ids": token_ids} | (
                {"prompt_token_ids": output.prompt_token_ids} if first else {}
            )
        rows: list[Any] = list(scores)
        if first and body.echo:
            token_ids, rows = output.prompt_token_ids + token_ids, [*(output.prompt_logprobs or ()), *rows]
        return CompletionChoice(
            index=self._index,
            text=text,
            logprobs=None if body.logprobs is None else self._scores.take(token_ids, rows),
            finish_reason=answer.finish_reason,  # type: ignore[arg-type]  # never "abort" here
            stop_reason=answer.stop_reason,
            **extra,
        )

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return self._call.served.tokenizer.decode(output.prompt_token_ids)
