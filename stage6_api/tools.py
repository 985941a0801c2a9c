"""Tool calling: what a request may ask for, what becomes of it, and how an answer's calls are read."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidValue
from common.structured import Grammar, check_enforceable, check_json_schema
from stage6_api.tool_events import ToolParser
from stage6_api.tools_grammar import calls_grammar, parameters
from stage6_api.tools_hermes import HermesParser

PARSERS: dict[str, Callable[[bool], ToolParser]] = {"hermes": HermesParser}
"""How a model family writes calls -> its parser, made with "may there be several calls".

Calls that must be made are held to hermes' form whatever the family, and read by its parser.
"""

FUNCTION_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
CHOICES = "none, auto, required or {type: function, function: {name}}"


@dataclass(frozen=True)
class ToolPlan:
    """What tools mean for one request.

    Attributes:
        tools: that the model is told of.
        grammar: of the calls that it must make; None if it may choose.
        named: whether one function was asked for by name.
        parallel: whether more than the first call is reported.
        parser: a key of PARSERS.
    """

    tools: list[dict[str, Any]]
    grammar: Grammar | None
    named: bool
    parallel: bool
    parser: str

    def new_parser(self) -> ToolParser:
        """A reader for one answer."""
        make = PARSERS[self.parser] if self.grammar is None else HermesParser
        return make(self.parallel)


def plan_tools(
    tools: list[dict[str, Any]] | None,
    tool_choice: str | dict[str, Any] | None,
    parallel_tool_calls: bool,
    structured: bool,
    parser: str,
) -> ToolPlan | None:
    """Check a request's tools and choose how they are offered; None if they are not.

    Reads every schema, which takes a while for large ones: not for the event loop.

    Args:
        tools: None if the request has no such field.
        tool_choice: None is "auto" with tools and "none" without.
        parallel_tool_calls: whether several calls may be reported.
        structured: whether the request asks for a grammar of its own, too.
        parser: a key of PARSERS.

    Raises:
        InvalidValue: names `tools`, one of them, `tool_choice` or `tool_call_parser`.
    """
    if parser not in PARSERS:
        raise InvalidValue("tool_call_parser", parser, ", ".join(PARSERS))
    if tools is None:
        if tool_choice not in (None, "none"):
            raise InvalidValue("tool_choice", tool_choice, "none where there are no tools")
        return None
    if not tools:
        raise InvalidValue("tools", tools, "at least one tool; leave the field out to offer none")
    names = [_check_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise InvalidValue(f"tools[{i}].function.name", name, "a name that no other tool has")
    choice = "auto" if tool_choice is None else tool_choice
    wanted = _wanted(choice, names)
    if choice == "none":
        return None
    if choice == "auto":
        return ToolPlan(tools, None, False, parallel_tool_calls, parser)
    if structured:
        raise InvalidValue("tool_choice", choice, "auto or none beside response_format or structured_outputs")
    for i, tool in enumerate(tools):
        if names[i] in wanted:
            check_enforceable(parameters(tool["function"]), f"tools[{i}].function.parameters")
    named = isinstance(choice, dict)
    callable_ones = [tool for tool, name in zip(tools, names, strict=True) if name in wanted]
    several = parallel_tool_calls and not named
    return ToolPlan(tools, calls_grammar(callable_ones, several), named, several, parser)


def finish_reason(plan: ToolPlan | None, engine_reason: str, made_calls: bool) -> str:
    """What the API says of an answer's end: "tool_calls" if calls ended it by the model's own choice.

    A call that was asked for by name says nothing about why the answer ended, and a cut answer is a cut one.
    """
    chosen = plan is not None and made_calls and not plan.named
    return "tool_calls" if chosen and engine_reason == "stop" else engine_reason


def _wanted(choice: object, names: list[str]) -> list[str]:
    """The functions that a choice leaves."""
    if choice in ("none", "auto", "required"):
        return names
    function = (
        choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    )
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidValue("tool_choice", choice, CHOICES)
    if name not in names:
        raise InvalidValue("tool_choice", name, "the name of one of the tools")
    return [name]


def _check_tool(tool: object, field: str) -> str:
    """The function's name, if the tool is well formed."""
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict):
        raise InvalidValue(field, tool, "{type: function, function: {name, description, parameters}}")
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not FUNCTION_NAME.fullmatch(name):
        raise InvalidValue(f"{field}.function.name", name, "1 to 64 of a-z, A-Z, 0-9, _ and -")
    if description is not None and not isinstance(description, str):
        raise InvalidValue(f"{field}.function.description", description, "a string")
    if function.get("parameters") is not None:
        schema = check_json_schema(function["parameters"], f"{field}.function.parameters ({name})")
        if schema and schema.get("type", "object") != "object":
            raise InvalidValue(f"{field}.function.parameters ({name})", schema, "a schema of an object")
    return name
