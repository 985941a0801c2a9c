"""The error object, wherever a request fails (OPENAI_API.md 1.3, 1.4, 4.3)."""

from __future__ import annotations

import json
import re
import socket
from dataclasses import replace

import openai
import pytest
from support.live_server import SETTINGS, serve

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SHAPE = {"message", "type", "param", "code"}


def error_of(answer, status):
    """The error object of an answer, its shape checked."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == SHAPE
    assert isinstance(error["message"], str)
    assert error["message"]
    assert all(error[name] is None or isinstance(error[name], str) for name in SHAPE)
    return error


@pytest.mark.parametrize(
    "body", ["[]", '"x"', "1", "null", "", "{", "[" * 100000, '{"a":' * 5000, "\x00", "NaN"]
)
def test_body_that_is_no_object(live, body):
    """B39: also what is no JSON at all, or too deep for any parser."""
    for path in (CHAT, TEXT, "/tokenize", "/detokenize", "/v1/responses"):
        answer = live.http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert error_of(answer, 400)["type"] == "BadRequestError"


@pytest.mark.parametrize(
    "kind", ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x"]
)
def test_wrong_content_type(live, kind):
    """S7: says what it must be; a charset behind it does not matter."""
    text = json.dumps(live.chat("x", max_tokens=1))
    answer = live.http.post(CHAT, content=text, headers={"Content-Type": kind})
    assert "application/json" in error_of(answer, 400)["message"]
    good = {"Content-Type": "application/json; charset=utf-8"}
    assert live.http.post(CHAT, content=text, headers=good).status_code == 200


def test_unknown_model(live):
    """1.3: 404 with the code that OpenAI has for it."""
    for path, body in (
        (CHAT, live.chat("x", model="gpt-4")),
        (TEXT, live.complete("x", model="gpt-4")),
        ("/tokenize", {"model": "gpt-4", "prompt": "x"}),
        ("/detokenize", {"model": "gpt-4", "tokens": []}),
        ("/v1/responses", {"model": "gpt-4", "input": "x"}),
    ):
        error = error_of(live.http.post(path, json=body), 404)
        assert (error["type"], error["param"], error["code"]) == ("NotFoundError", "model", "model_not_found")
    with pytest.raises(openai.NotFoundError):
        live.openai.models.retrieve("gpt-4")


def test_unknown_route_and_method(live):
    """1.1, 1.3: what is out of scope is a 404 in the same shape, a wrong method a 405."""
    for path in (
        "/nope",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/chat/completions/batch",
        "/score",
        "/rerank",
    ):
        error_of(live.http.post(path, json={}), 404)
    answer = live.http.get(CHAT)
    error_of(answer, 405)
    assert answer.headers["allow"] == "POST"
    error_of(live.http.request("PROPFIND", "/v1/models"), 405)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_prompt_beyond_the_context(live, path, stream):
    """B41, D5, section 7 rows 10 and 19: before any 200, the true limit, and the words that clients look for."""
    for length in (2100, 200_000):  # the second one is refused by its characters alone
        make = live.chat if path == CHAT else live.complete
        error = error_of(live.http.post(path, json=make("x" * length, stream=stream)), 400)
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith("This model's maximum context length is 2048 tokens")
        assert "context_length_exceeded" in error["message"]
    error_of(live.http.post(TEXT, json=live.complete([70] * 2048)), 400)
    with pytest.raises(openai.BadRequestError, match="context_length_exceeded"):
        live.openai.completions.create(model="toy", prompt="x" * 3000)


def test_many_errors_are_capped(live):
    """S28: a body of thousands of faults gets a short answer that says how many there are."""
    faults = {f"logit_{i}": 1 for i in range(5000)}
    bias = {str(i): "x" for i in range(5000)}
    answer = live.http.post(CHAT, json=live.chat("x", logit_bias=bias, **faults))
    error = error_of(answer, 400)
    assert len(answer.content) < 4000
    assert re.search(r"and \d+ more", error["message"])
    many = 50000
    for bad in (
        {"prompt": [{}] * many},
        {"prompt": [[1.5]] * many},
        {"messages": [5] * many},
        {"messages": "x", "stop": ["x"] * many, "n": "y" * many},
    ):
        answer = live.http.post(TEXT if "prompt" in bad else CHAT, json=bad)
        error_of(answer, 400)
        assert len(answer.content) < 4000


def test_nothing_of_the_server_in_messages(live):
    """S29: no paths, no addresses, no names of classes."""
    bodies = [
        {},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}, 5]}]},
        {"messages": "x", "temperature": {}, "stop": [[]], "tools": 5, "stream_options": 7},
        {"messages": [{"role": "user", "content": {"a": object.__name__}}]},
        live.chat("x", model="x" * 5000),
    ]
    for body in bodies:
        answer = live.http.post(CHAT, json=body)
        message = answer.json()["error"]["message"]
        assert len(message) <= 1000
        assert not re.search(
            r"/(home|usr|work|root|lib)/|0x[0-9a-f]{6,}|site-packages|Traceback|\.py\b", message
        )
        assert not re.search(r"ContentPart|ChatRequest|Message\b|StreamOptions|constrained|pydantic", message)


class TestKeys:
    """4.3: any of several keys; health and metrics stay open, /tokenize does not (D14)."""

    @pytest.fixture(scope="class")
    def locked(self):
        with serve(replace(SETTINGS, api_keys=("first", "second"))) as live:
            yield live

    @pytest.mark.parametrize("headers", [
        {}, {"Authorization": "Bearer wrong"}, {"Authorization": "first"}, {"Authorization": "Basic first"},
        {"Authorization": "Bearer"}, {"Authorization": "Bearer firs"}, {"X-Api-Key": "wrong"},
    ])  # fmt: skip
    def test_wrong_key(self, locked, headers):
        """S16."""
        for path in (CHAT, TEXT, "/tokenize", "/detokenize", "/v1/responses", "/nope"):
            answer = locked.http.post(path, json={}, headers=headers)
            error = error_of(answer, 401)
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert locked.http.get("/v1/models", headers=headers).status_code == 401

    @pytest.mark.parametrize("headers", [
        {"Authorization": "Bearer first"}, {"Authorization": "bearer second"}, {"X-Api-Key": "second"},
    ])  # fmt: skip
    def test_right_key(self, locked, headers):
        """S14."""
        assert locked.http.get("/v1/models", headers=headers).status_code == 200
        answer = locked.http.post("/tokenize", json={"prompt": "x"}, headers=headers)
        assert answer.status_code == 200

    def test_open_paths(self, locked):
        for path in ("/health", "/ping", "/metrics", "/version", "/load", "/docs", "/openapi.json"):
            assert locked.http.get(path).status_code == 200

    def test_official_client(self, locked):
        """The SDK raises its own error, with a message (section 7, row 20)."""
        assert locked.openai.models.list().data[0].id == "toy"
        with pytest.raises(openai.AuthenticationError, match="Incorrect API key") as caught:
            locked.openai.with_options(api_key="wrong").models.list()
        assert caught.value.code == "invalid_api_key"


def test_keys_are_ignored_where_none_is_set(live):
    """S14: the official clients always send one."""
    headers = {"Authorization": "Bearer whatever"}
    assert live.http.get("/v1/models", headers=headers).status_code == 200


def test_body_too_large(with_settings):
    """4.3: 413, whether the length is announced or not."""
    with with_settings(max_body_bytes=10_000) as live:
        body = json.dumps(live.chat("x" * 20_000)).encode()
        json_type = {"Content-Type": "application/json"}
        error_of(live.http.post(CHAT, content=body, headers=json_type), 413)
        in_pieces = (body[i : i + 1000] for i in range(0, len(body), 1000))
        error_of(live.http.post(CHAT, content=in_pieces, headers=json_type), 413)
        assert live.http.post(CHAT, json=live.chat("x" * 1000, max_tokens=1)).status_code == 200


def test_request_ids(live):
    """S17, D11, 4.5: always there; the caller's, if it is harmless; the answer's id ends in it."""
    answer = live.http.post(CHAT, json=live.chat("x", max_tokens=1))
    assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])
    assert answer.json()["id"] == f"chatcmpl-{answer.headers['x-request-id']}"
    mine = {"X-Request-Id": "my-id.7:a_b"}
    answer = live.http.post(TEXT, json=live.complete("x", request_id="other"), headers=mine)
    assert answer.headers["x-request-id"] == "my-id.7:a_b"
    assert answer.json()["id"] == "cmpl-my-id.7:a_b"
    answer = live.http.post(TEXT, json=live.complete("x", request_id="from-body"))
    assert answer.headers["x-request-id"] == "from-body"
    for bad in ("x" * 129, "a b", "a;b", "é"):
        answer = live.http.get("/v1/models", headers={"X-Request-Id": bad.encode()})
        assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])
    assert live.http.get("/nope").headers["x-request-id"]
    created = live.openai.chat.completions.create(**live.chat("x", max_tokens=1))
    assert created._request_id


def test_equal_ids_do_not_disturb_each_other(live):
    """4.5: two callers with one id used to hang vLLM."""
    body = live.complete(["a", "b"], max_tokens=3)
    answers = [live.http.post(TEXT, json=body, headers={"X-Request-Id": "same"}).json() for _ in range(2)]
    assert answers[0]["choices"] == answers[1]["choices"]


def test_unfinished_headers_do_not_hang(live):
    """A client that sends half a request and leaves costs nothing."""
    host, port = live.base.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 50\r\n"
        connection.sendall(head + b"Content-Type: application/json\r\n\r\n{")
    assert live.http.get("/health").status_code == 200
    live.wait_idle()


class TestCors:
    """4.3: browsers."""

    def test_no_origin(self, live):
        """S19: none unless the operator names it."""
        answer = live.http.get("/v1/models", headers={"Origin": "http://page.example"})
        assert "access-control-allow-origin" not in answer.headers
        preflight = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
        assert live.http.options(CHAT, headers=preflight).status_code == 405

    def test_explicit_origin(self, with_settings):
        """S20: on error answers, too, or the page could not read why."""
        with with_settings(allowed_origins=("http://page.example",), api_keys=("k",)) as live:
            origin = {"Origin": "http://page.example"}
            asks = {
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "authorization",
            }
            preflight = origin | asks
            assert live.http.options(CHAT, headers=preflight).status_code == 200
            for headers, path, status in (({}, "/v1/models", 401), ({"Authorization": "Bearer k"}, "/nope", 404),
                                          ({"Authorization": "Bearer k"}, "/v1/models", 200)):  # fmt: skip
                answer = live.http.get(path, headers=origin | headers)
                assert answer.status_code == status
                assert answer.headers["access-control-allow-origin"] == "http://page.example"
            other = live.http.get("/health", headers={"Origin": "http://evil.example"})
            assert "access-control-allow-origin" not in other.headers
