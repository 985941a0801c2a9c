"""One answer of a chat: text and tool calls, whole or as deltas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from common.output import CompletionOutput
from stage6_api.answering import Call, Progress
from stage6_api.logprobs import chat_logprobs
from stage6_api.schemas_answers import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    Delta,
    DeltaFunction,
    DeltaToolCall,
    FunctionCall,
    ToolCall,
)
from stage6_api.tool_events import CallStart, Text, ToolEvent
from stage6_api.tools import ToolPlan, finish_reason


def call_id() -> str:
    """A new tool call's id."""
    return f"call_{uuid4().hex[:24]}"


def read_calls(plan: ToolPlan | None, text: str) -> tuple[str, list[FunctionCall]]:
    """An ended answer's text without its calls, and the calls; one that was cut short is left out."""
    plain = ""
    names: list[str] = []
    arguments: list[str] = []
    for event in AnswerReader(plan).events(text, ended=True):
        if isinstance(event, Text):
            plain += event.text
        elif isinstance(event, CallStart):
            names.append(event.name)
            arguments.append("")
        else:
            arguments[event.index] += event.text
    calls = zip(names, arguments, strict=True)
    return plain, [FunctionCall(name=name, arguments=text) for name, text in calls if _is_json(text)]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def whole_choice(call: Call, plan: ToolPlan | None, echo: str, answer: CompletionOutput) -> ChatChoice:
    """An ended answer."""
    text, calls = read_calls(plan, answer.text)
    message: dict[str, Any] = {"content": (echo + text) or (None if calls else "")}
    if calls:
        message["tool_calls"] = [ToolCall(id=call_id(), type="function", function=made) for made in calls]
    extra = {"token_ids": answer.token_ids} if call.body.return_token_ids else {}
    return ChatChoice(
        index=answer.index,
        message=AssistantMessage(role="assistant", refusal=None, **message),
        logprobs=_logprobs(call, answer.token_ids, answer.logprobs or []),
        finish_reason=finish_reason(plan, answer.finish_reason or "", bool(calls)),  # type: ignore[arg-type]
        stop_reason=answer.stop_reason,
        **extra,
    )


def _logprobs(call: Call, token_ids: list[int], scores: list[Any]) -> Any:
    if not call.body.logprobs:
        return None
    return chat_logprobs(token_ids, scores, call.body.top_logprobs or 0, call.spelling)


class AnswerReader:
    """Text of one answer to events; without tools, all of it is text."""

    def __init__(self, plan: ToolPlan | None) -> None:
        self._parser = None if plan is None else plan.new_parser()

    def events(self, text: str, ended: bool) -> list[ToolEvent]:
        """What new text brings, and with the answer's end what was held back."""
        if self._parser is None:
            return [Text(text)] if text else []
        events = self._parser.push(text) if text else []
        return events + (self._parser.finish() if ended else [])


class StreamedChoice:
    """One answer, cut into deltas.  Each choice has a parser of its own."""

    def __init__(self, call: Call, plan: ToolPlan | None, index: int) -> None:
        self._call = call
        self._plan = plan
        self._index = index
        self._progress = Progress()
        self._reader = AnswerReader(plan)
        self._calls = 0
        self._over = False

    def opening(self) -> ChatChunkChoice:
        """The role, once."""
        return self._part(Delta(role="assistant", content=""))

    def content(self, text: str) -> ChatChunkChoice:
        """Text that the model has not made."""
        return self._part(Delta(content=text))

    def news(self, answer: CompletionOutput) -> Iterator[ChatChunkChoice | str]:
        """Deltas since the last output (plain text if there is nothing beside it); then the end, by itself.

        Some clients drop text that rides on the chunk with the reason.
        """
        if self._over:
            return
        text = self._progress.take(answer)
        for event in self._reader.events(text, answer.finished):
            if isinstance(event, Text) and self._call.text_only:
                yield event.text
            else:
                yield self._part(self._delta(event), **self._waiting())
        if answer.finished:
            self._over = True
            reason = finish_reason(self._plan, answer.finish_reason or "", self._calls > 0)
            yield self._part(Delta(), reason, stop_reason=answer.stop_reason, **self._waiting())

    def _delta(self, event: ToolEvent) -> Delta:
        if isinstance(event, Text):
            return Delta(content=event.text)
        if isinstance(event, CallStart):
            self._calls += 1
            start = DeltaFunction(name=event.name, arguments="")
            return Delta(
                tool_calls=[DeltaToolCall(index=event.index, id=call_id(), type="function", function=start)]
            )
        return Delta(
            tool_calls=[DeltaToolCall(index=event.index, function=DeltaFunction(arguments=event.text))]
        )

    def _waiting(self) -> dict[str, Any]:
        """Tokens and log probabilities that go out with the next delta."""
        token_ids, scores = self._progress.pop()
        extra: dict[str, Any] = {}
        if token_ids and self._call.body.return_token_ids:
            extra["token_ids"] = token_ids
        if token_ids and self._call.body.logprobs:
            extra["logprobs"] = _logprobs(self._call, token_ids, scores)
        return extra

    def _part(self, delta: Delta, reason: str | None = None, **extra: Any) -> ChatChunkChoice:
        fields = {"logprobs": None} | extra
        return ChatChunkChoice(index=self._index, delta=delta, finish_reason=reason, **fields)  # type: ignore[arg-type]
