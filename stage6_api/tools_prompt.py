"""How tools, calls and results come into the prompt: through the model's own chat template, or as plain text.

A template that has a variable `tools` is given tools, calls and results as it expects them.  Any other model
(SmolLM2 is one) is told in its system message, in hermes' form:

    You can call functions. ...
    <tools>
    {"type": "function", "function": {...}}          one line for each
    </tools>
    To call one, write its name and its arguments as JSON in this form, once for each call: ...

Its own calls are then shown to it as it wrote them, and their results as the user's next message:

    <tool_response>
    what the tool said
    </tool_response>

A template that refuses a system message refuses tools with it: the request is answered with a 400.
"""

from __future__ import annotations

import json
from typing import Any

from common.errors import InvalidValue
from common.tokenizer import Tokenizer
from stage6_api.tools import ToolPlan
from stage6_api.tools_hermes import CLOSE, OPEN

Message = dict[str, Any]

PREAMBLE = """\
You can call functions. They are listed here, one JSON object per line:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as JSON in this form, once for each call:
{open}
{{"name": "function_name", "arguments": {{"argument": "value"}}}}
{close}
The results come back between <tool_response> and </tool_response>. Call a function only if you need it."""


def with_tools(
    messages: list[Message], plan: ToolPlan | None, tokenizer: Tokenizer
) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """A conversation as the model's chat template can show it.

    Args:
        messages: the turns; content is text, or None beside `tool_calls`.  Not changed.
        plan: the request's tools; None if it offers none (its history may still hold calls).
        tokenizer: whose template it is.

    Returns:
        The messages, and the tools for the template's variable `tools`: None where the messages tell of them.

    Raises:
        InvalidValue: a call of the history has no function name or no arguments; names it.
    """
    for i, message in enumerate(messages):
        for j, call in enumerate(message.get("tool_calls") or []):
            _check_call(call, f"messages[{i}].tool_calls[{j}]")
    if _knows_tools(tokenizer):
        return [_with_parsed_calls(message) for message in messages], None if plan is None else plan.tools
    plain = _as_text(messages)
    return (plain if plan is None else _with_preamble(plain, plan.tools)), None


def _check_call(call: object, field: str) -> None:
    function = call.get("function") if isinstance(call, dict) else None
    if (
        not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not isinstance(function.get("arguments"), str | dict | None)
    ):
        raise InvalidValue(field, call, "{id, type, function: {name, arguments: a JSON text}}")


def _knows_tools(tokenizer: Tokenizer) -> bool:
    """Whether the template (or one of several by name) has a variable for tools."""
    template = tokenizer.hf.chat_template
    texts = template.values() if isinstance(template, dict) else [template or ""]
    return any("tools" in text for text in texts)


def _with_parsed_calls(message: Message) -> Message:
    """Arguments as objects, which templates write as JSON themselves; no empty list of calls."""
    calls = message.get("tool_calls")
    if not calls:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    parsed = [call | {"function": call["function"] | {"arguments": _arguments(call)}} for call in calls]
    return message | {"content": message.get("content") or "", "tool_calls": parsed}


def _arguments(call: dict[str, Any]) -> Any:
    """A call's arguments as an object; as the text they are if a model wrote no JSON."""
    arguments = call["function"].get("arguments") or {}
    if isinstance(arguments, dict):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _as_text(messages: list[Message]) -> list[Message]:
    """Calls as the model wrote them, and the results that follow each other as one message of the user's."""
    shown: list[Message] = []
    last_role = None
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role == "tool":
            response = f"<tool_response>\n{content}\n</tool_response>"
            if last_role == "tool":
                shown[-1]["content"] += f"\n{response}"
            else:
                shown.append({"role": "user", "content": response})
        else:
            calls = [_call_text(call) for call in message.get("tool_calls") or []]
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            shown.append(kept | {"content": "\n".join(filter(None, [content, *calls]))})
        last_role = role
    return shown


def _call_text(call: dict[str, Any]) -> str:
    name, arguments = call["function"]["name"], call["function"].get("arguments") or "{}"
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments)
    return f'{OPEN}\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n{CLOSE}'


def _with_preamble(messages: list[Message], tools: list[dict[str, Any]]) -> list[Message]:
    """The tools at the end of the system message, or in one of their own."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    preamble = PREAMBLE.format(tools=lines, open=OPEN, close=CLOSE)
    if messages and messages[0]["role"] == "system":
        first = messages[0] | {"content": f"{messages[0]['content']}\n\n{preamble}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": preamble}, *messages]
