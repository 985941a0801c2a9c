"""Structured output over HTTP: random text is held to it, and what cannot be enforced is a 400."""

from __future__ import annotations

import ipaddress
import json

import openai
import pytest
from jsonschema import validate
from pydantic import BaseModel

PATHS = ("/v1/chat/completions", "/v1/completions")
OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}, "tag": {"type": "string", "maxLength": 4}},
    "required": ["x", "tag"],
    "additionalProperties": False,
}  # fmt: skip


def ask(live, path, **more):
    make = live.chat if path == PATHS[0] else live.complete
    return live.http.post(path, json=make("noise", **{"temperature": 1, "max_tokens": 400, **more}))


def text(live, path, **more):
    """The text of an answer that must succeed and end by itself."""
    answer = ask(live, path, **more)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"] if path == PATHS[0] else choice["text"]


@pytest.mark.parametrize("path", PATHS)
def test_choice(live, path):
    """B12: one of them, whatever the model wants to say; each of them, if it wants to."""
    words = ["Python", "Rust", "C++"]
    wanted = {"choice": words}
    assert {text(live, path, structured_outputs=wanted, seed=i) for i in range(9)} <= set(words)
    for word in words:
        body = (live.chat if path == PATHS[0] else live.complete)(live.lm.say(f"{word}, of course"))
        choice = live.http.post(path, json=body | {"structured_outputs": wanted}).json()["choices"][0]
        assert (choice["message"]["content"] if path == PATHS[0] else choice["text"]) == word


@pytest.mark.parametrize("path", PATHS)
def test_regex(live, path):
    """B14: an IPv4 address, nothing before or after it."""
    for seed in range(3):
        way = {"regex": rf"{OCTET}(\.{OCTET}){{3}}"}
        ipaddress.IPv4Address(text(live, path, structured_outputs=way, seed=seed))


@pytest.mark.parametrize("path", PATHS)
def test_json_schema(live, path):
    """B18: valid, as `response_format` and as `structured_outputs`; with and without strict."""
    for strict in ({}, {"strict": True}, {"strict": None}):
        form = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT, **strict}}
        validate(json.loads(text(live, path, response_format=form, seed=5)), POINT)
    validate(json.loads(text(live, path, structured_outputs={"json": json.dumps(POINT)}, seed=6)), POINT)


def test_json_object(live):
    """B17: an object (the script is one: noise would not close its strings), from its first character on."""
    marker = live.lm.say('{"a": [1, {"b": null}]}')
    for _ in range(2):
        answer = live.http.post(PATHS[0], json=live.chat(marker, response_format={"type": "json_object"}))
        assert json.loads(answer.json()["choices"][0]["message"]["content"]) == {"a": [1, {"b": None}]}
    body = live.chat(live.lm.say("[1]"), response_format={"type": "json_object"}, max_tokens=1)
    first = live.http.post(PATHS[0], json=body).json()["choices"][0]["message"]["content"]
    assert first in ("{", " ", "\n")  # whatever the model wants to say


class Point(BaseModel):
    """What the official client's `parse` is given."""

    x: int
    tag: str


def test_the_official_clients_parse(live):
    """3.1: the schema that it makes of a class; an answer that is cut is "length", which it raises as such (3.4)."""
    marker = live.lm.say('{"x": 4, "tag": "é"}')
    asked = {"model": "toy", "messages": [{"role": "user", "content": marker}], "response_format": Point}
    answer = live.openai.chat.completions.parse(**asked, temperature=0)
    assert answer.choices[0].message.parsed == Point(x=4, tag="é")
    with pytest.raises(openai.LengthFinishReasonError):
        live.openai.chat.completions.parse(**asked, temperature=0, max_tokens=3)


@pytest.mark.parametrize("path", PATHS)
def test_null_is_no_format(live, path):
    """Section 7, row 22: as if it had been left out."""
    for field in ("response_format", "structured_outputs"):
        assert ask(live, path, **{field: None}, max_tokens=2).status_code == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("field", "value"), [
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {"properties": {"a": 3}}}}),  # A29
    ("response_format", {"type": "json_schema"}),  # A40
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
    ("structured_outputs", {"grammar": "start: missing"}),  # A31
    ("structured_outputs", {"grammar": ""}),  # B32
    ("structured_outputs", {"regex": {"a": 1}}),  # B15
    ("structured_outputs", {"regex": "a", "choice": ["a"]}),
])  # fmt: skip
def test_what_cannot_be_enforced(live, path, field, value):
    """A29, A31, A40, B15, B32: a 400 that names the field, before any 200, and the engine lives."""
    for stream in (False, True):
        answer = ask(live, path, **{field: value}, stream=stream)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == field
    assert ask(live, path, max_tokens=1).status_code == 200
