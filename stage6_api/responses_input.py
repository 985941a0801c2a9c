"""From a Responses request to the chat request that means the same."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from stage6_api.errors import ApiError, bad_request, from_validation, unsupported
from stage6_api.schemas import ChatRequest, ResponsesRequest

LOGPROBS = "message.output_text.logprobs"


def to_chat(body: ResponsesRequest) -> ChatRequest:
    """Translate; what chat checks is checked there.

    Raises:
        ApiError: an item or a tool of a kind that this server does not know, or something that would need
            stored responses.
    """
    if body.previous_response_id is not None:
        raise not_stored(body.previous_response_id, "previous_response_id")
    if body.background:
        raise unsupported("background", "nothing is stored, so nobody could fetch the answer")
    extra = body.model_extra or {}
    for field in ("conversation", "prompt"):
        if extra.get(field) is not None:
            raise unsupported(field, "nothing is stored")
    wants_scores = LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": _messages(body),
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "stream": body.stream,
        "tools": None
        if body.tools is None
        else [_tool(tool, i) for i, tool in enumerate(body.tools)] or None,
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _format(body.text),
        "logprobs": wants_scores,
        "top_logprobs": body.top_logprobs if wants_scores else None,
    }
    more = {
        name: extra[name] for name in ("seed", "cache_salt", "priority", "stop", "top_k") if name in extra
    }
    try:
        return ChatRequest.model_validate(fields | more)
    except ValidationError as error:
        names = {"messages": "input", "max_completion_tokens": "max_output_tokens"}
        faults = [
            {**fault, "loc": ("body", *(names.get(str(part), part) for part in fault["loc"]))}
            for fault in error.errors()
        ]
        raise from_validation(faults) from None


def not_stored(response_id: str, field: str | None = None) -> ApiError:
    """404 for a response that might have been stored, were anything stored."""
    message = f"Response with id {response_id[:100]!r} not found: this server stores no responses."
    return ApiError(404, message, param=field, code="response_not_found")


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Instructions first, then the items; calls join the assistant's turn that they belong to."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for i, item in enumerate(body.input):
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(_call(item, i))
        elif kind == "function_call_output":
            output = _field(item, "output", i, (str, list))
            messages.append({"role": "tool", "content": output, "tool_call_id": _field(item, "call_id", i)})
        elif kind != "reasoning":  # earlier thoughts are no part of the prompt
            raise bad_request(f"input[{i}]: items of type {str(kind)[:50]!r} are not supported", "input")
    return messages


def _call(item: dict[str, Any], i: int) -> dict[str, Any]:
    function = {"name": _field(item, "name", i), "arguments": _field(item, "arguments", i)}
    return {"id": _field(item, "call_id", i), "type": "function", "function": function}


def _field(item: dict[str, Any], name: str, i: int, kinds: type | tuple[type, ...] = str) -> Any:
    value = item.get(name)
    if not isinstance(value, kinds):
        raise bad_request(f"input[{i}].{name}: a value is missing or of the wrong type", "input")
    return value


def _tool(tool: dict[str, Any], i: int) -> dict[str, Any]:
    """The flat form of a function as the nested one."""
    if tool.get("type") != "function":
        kind = str(tool.get("type"))[:50]
        raise bad_request(
            f"tools[{i}]: tools of type {kind!r} are not supported, only functions are", "tools"
        )
    if "function" in tool:
        return tool
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and "name" in choice:
        return {"type": choice.get("type"), "function": {"name": choice["name"]}}
    return choice


def _format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    """`text.format` as `response_format`: the schema lies one level deeper there."""
    wanted = (text or {}).get("format")
    if wanted is None:
        return None
    if not isinstance(wanted, dict):
        raise bad_request("text.format must be an object", "text")
    if wanted.get("type") != "json_schema":
        return wanted
    return {"type": "json_schema", "json_schema": {k: v for k, v in wanted.items() if k != "type"}}
