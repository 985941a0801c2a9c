"""`POST /v1/chat/completions`: a conversation in, `n` answers out, whole or as they are made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from common.output import RequestOutput
from common.structured import Grammar
from stage6_api.answering import ERRORS, Call, client_gone, json_answer, usage
from stage6_api.chat_choice import StreamedChoice, whole_choice
from stage6_api.errors import bad_request
from stage6_api.logprobs import prompt_logprobs
from stage6_api.params import (
    PRIORITY_HEADER,
    Wanted,
    asked_max_tokens,
    check_fields,
    compile_grammar,
    engine_requests,
    read_priority,
)
from stage6_api.prompts import Prompt, chat_prompt, final_text
from stage6_api.schemas import ChatRequest
from stage6_api.schemas_answers import ChatChunkChoice, ChatCompletion, ChatCompletionChunk
from stage6_api.served import Served
from stage6_api.sse import TEXT, EventStream, TextFrames, frames
from stage6_api.tools import ToolPlan, plan_tools
from stage6_api.tools_grammar import asked_grammar, final_grammar

router = APIRouter()
CHUNK = "chat.completion.chunk"


@dataclass(frozen=True)
class Chat:
    """A chat call under way: how its answers are read."""

    call: Call
    plan: ToolPlan | None
    echo: str  # what every answer begins with, unmade


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=ERRORS)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    chat = await begin(request.app.state.served, body, request, "chatcmpl")
    call = chat.call
    if body.stream:
        return EventStream(frames(_stream(chat)), call.release, call.served.settings.keep_alive_seconds)
    outputs = await call.results()
    return client_gone() if outputs is None else json_answer(_answer(chat, outputs[0]))


async def begin(served: Served, body: ChatRequest, http: Request, prefix: str) -> Chat:
    """Check everything, make token ids off the event loop, and let the request in.

    Raises:
        ApiError, InvalidValue: nothing has been sent, and the engine knows nothing of it.
    """
    served.engine.check_ready()
    check_fields(served, body)
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs is only allowed with logprobs=true", "top_logprobs")
    plan, grammar, prompt = await asyncio.to_thread(_read, served, body)
    wanted = Wanted(
        max_tokens=asked_max_tokens(served, body, "max_completion_tokens", "max_tokens"),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        grammar=await compile_grammar(served, grammar),
        # A parser must see the marks of a call, which may be special tokens.
        skip_special_tokens=body.skip_special_tokens is not False and plan is None,
        priority=read_priority(served, body, http.headers.get(PRIORITY_HEADER)),
    )
    if body.use_beam_search and wanted.grammar is not None:
        raise bad_request("tool_choice: only auto and none are supported with beam search", "tool_choice")
    job = served.submit(engine_requests(served, body, [prompt], wanted), [None], stream=bool(body.stream))
    echo = final_text(body.messages) if body.echo else ""
    return Chat(Call.begin(prefix, served, body, http, job), plan, echo)


def _read(served: Served, body: ChatRequest) -> tuple[ToolPlan | None, Grammar | None, Prompt]:
    """The tools, the answer's grammar and the prompt; takes time for long ones, so not on the event loop."""
    asked = asked_grammar(body.response_format, body.structured_outputs)
    plan = plan_tools(
        body.tools,
        body.tool_choice,
        body.parallel_tool_calls is not False,
        asked is not None,
        served.settings.tool_call_parser,
    )
    return plan, final_grammar(plan, asked), chat_prompt(served, body, plan)


def _answer(chat: Chat, output: RequestOutput) -> ChatCompletion:
    """The whole answer."""
    call = chat.call
    extra: dict[str, Any] = {}
    if output.prompt_logprobs is not None:
        extra["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, call.spelling)
    if call.body.return_token_ids:
        extra["prompt_token_ids"] = output.prompt_token_ids
    return ChatCompletion(
        **call.head("chat.completion"),
        choices=[whole_choice(call, chat.plan, chat.echo, answer) for answer in output.outputs],
        usage=usage([output]),
        system_fingerprint=call.served.fingerprint,
        **extra,
    )


async def _stream(chat: Chat) -> AsyncIterator[ChatCompletionChunk | bytes]:
    """Roles in order, then news of any choice, a finish chunk for each, and the usage at last."""
    call = chat.call
    choices: list[StreamedChoice] = []
    texts: list[TextFrames] = []  # of each choice
    async for _, output in call.job.updates():
        chunk = _chunks_of(chat, output)
        if not choices:  # only now, so that whoever waits for the first event waits for the first token
            choices = [StreamedChoice(call, chat.plan, index) for index in range(len(output.outputs))]
            extra = {"prompt_token_ids": output.prompt_token_ids} if call.body.return_token_ids else {}
            for choice in choices:
                yield chunk(choice.opening(), **extra)
                extra = {}
            texts = [TextFrames(chunk(choice.content(TEXT))) for choice in choices]
            for choice in choices if chat.echo else ():
                yield chunk(choice.content(chat.echo))
        for choice, text, answer in zip(choices, texts, output.outputs, strict=True):
            for part in choice.news(answer):
                yield text.frame(part) if isinstance(part, str) else chunk(part)
        if output.finished:
            call.note([output])
            if call.usage_at_end:
                yield ChatCompletionChunk(
                    **call.head(CHUNK),
                    choices=[],
                    usage=usage([output]),
                    system_fingerprint=call.served.fingerprint,
                )


def _chunks_of(chat: Chat, output: RequestOutput) -> Callable[..., ChatCompletionChunk]:
    """Makes chunks of one choice each, at this point of the answer."""
    call = chat.call

    def chunk(part: ChatChunkChoice, **extra: Any) -> ChatCompletionChunk:
        return ChatCompletionChunk(**call.head(CHUNK), choices=[part], **call.usage_field([output]), **extra)

    return chunk
