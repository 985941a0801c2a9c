"""What an answer is held to: `response_format`, `structured_outputs`, and calls that must be made.

The four ways to ask become one `Grammar`.  A call is written in hermes' frame in every case, so that whoever
reads the answer needs no second way:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Bern"}}
    </tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

from common.errors import InvalidValue
from common.structured import BLANK, Grammar, check_json_schema

if TYPE_CHECKING:
    from stage6_api.tools import ToolPlan

ANY_OBJECT = '{"type": "object"}'
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
WAYS = ("json", "json_object", "regex", "choice", "grammar")


def asked_grammar(
    response_format: dict[str, Any] | None, structured_outputs: dict[str, Any] | None
) -> Grammar | None:
    """The grammar that a request asks for by either of the two fields; None if it asks for none.

    Raises:
        InvalidValue: both are given, or one is not well formed; names the field.
    """
    answer = None if response_format is None else _from_response_format(response_format)
    if structured_outputs is None:
        return answer
    if answer is not None:
        raise InvalidValue("structured_outputs", structured_outputs, "none beside response_format")
    return _from_structured_outputs(structured_outputs)


def calls_grammar(tools: Seq[dict[str, Any]], parallel: bool, answer: Grammar | None = None) -> Grammar:
    """One call of any of the tools, or several if `parallel`; with `answer`, either these or that.

    Args:
        tools: as the request has them, checked.
        parallel: whether more than one call may be made.
        answer: what the model may say in place of a call.
    """
    functions = [tool["function"] for tool in tools]
    calls = "call (BETWEEN call)*" if parallel else "call"
    rules = [
        f"start: calls{' | @answer' if answer else ''}",
        f"calls: {calls}",
        f"call: {' | '.join(f'call{i}' for i in range(len(functions)))}",
        f"BETWEEN: /{BLANK}/" if parallel else "",
        rf"CLOSE: /{BLANK}\}}{BLANK}<\/tool_call>/",
    ]
    for i, function in enumerate(functions):
        head = (
            rf'\{{{BLANK}"name"{BLANK}:{BLANK}"{function["name"]}"{BLANK},{BLANK}"arguments"{BLANK}:{BLANK}'
        )
        schema = parameters(function) | {"x-guidance": {"whitespace_pattern": BLANK}}
        rules += [
            f"call{i}: OPEN{i} args{i} CLOSE",
            f"OPEN{i}: /<tool_call>{BLANK}{head}/",
            f"args{i}: %json {json.dumps(schema)}",
        ]
    return Grammar("lark", "\n".join(filter(None, rules)), answer, field="tools")


def final_grammar(plan: ToolPlan | None, asked: Grammar | None) -> Grammar | None:
    """What a chat answer is held to, given its tools and the grammar that it asks for by itself.

    Tools that may be called beside a wanted format leave the model the choice: a call, or an answer in that
    format.  (Agents with an output type send both.)
    """
    if plan is None or (asked is None and plan.grammar is None):
        return asked
    return plan.grammar or calls_grammar(plan.tools, plan.parallel, asked)


def parameters(function: dict[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments; one that declares none takes none."""
    schema: dict[str, Any] = function.get("parameters") or NO_ARGUMENTS
    bare = schema.keys() <= {"type", "properties", "required", "title", "description", "$schema"}
    return NO_ARGUMENTS if bare and schema.get("properties") == {} else schema


def _from_response_format(wanted: dict[str, Any]) -> Grammar | None:
    field, kind = "response_format", wanted.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_schema", ANY_OBJECT, field=field)
    if kind != "json_schema":
        raise InvalidValue(field, wanted, "a type of text, json_object or json_schema")
    described = wanted.get("json_schema")
    if not isinstance(described, dict) or described.get("schema") is None:
        raise InvalidValue(field, wanted, "json_schema: {name, schema} with type json_schema")
    return _json_grammar(described["schema"], field)


def _from_structured_outputs(wanted: dict[str, Any]) -> Grammar | None:
    field = "structured_outputs"
    given = {key: value for key, value in wanted.items() if value is not None}
    if len(given) != 1 or not given.keys() <= set(WAYS):
        raise InvalidValue(field, wanted, f"exactly one of {', '.join(WAYS)}; nothing else is supported")
    [(way, value)] = given.items()
    if way == "json":
        return _json_grammar(_parsed(value, field) if isinstance(value, str) else value, field)
    if way == "json_object":
        if not isinstance(value, bool):
            raise InvalidValue(field, wanted, "json_object: true or false")
        return Grammar("json_schema", ANY_OBJECT, field=field) if value else None
    if way == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(x, str) and x for x in value):
            raise InvalidValue(field, wanted, "choice: a list of at least one non-empty string")
        return Grammar("choice", json.dumps(value), field=field)
    if not isinstance(value, str) or not value.strip():
        raise InvalidValue(field, wanted, f"{way}: a non-empty string")
    return Grammar("regex" if way == "regex" else "grammar", value, field=field)


def _json_grammar(schema: object, field: str) -> Grammar:
    return Grammar("json_schema", json.dumps(check_json_schema(schema, field)), field=field)


def _parsed(text: str, field: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidValue(field, text, "json: a JSON schema") from error
