"""Models, tokens, health, load, logs and the published schema (rows S of OPENAI_API.md 6.4)."""

from __future__ import annotations

import json
import logging
import re
import threading

import httpx
import jsonschema
import pytest
from support.waiting import wait_for

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def test_models(live):
    """S1, S2, 1.2: every name, the same `created` each time, ids with slashes."""
    first, second = live.http.get("/v1/models").json()["data"]
    assert (first["id"], first["root"], first["object"]) == ("toy", "toy", "model")
    assert first["max_model_len"] == 2048
    assert second["id"] == "org/alias"
    assert live.http.get("/v1/models/org/alias").json() == second
    assert live.openai.models.retrieve("toy").id == "toy"
    assert [model.id for model in live.openai.models.list()] == ["toy", "org/alias"]
    assert live.http.get("/v1/models").json()["data"][0]["created"] == first["created"]


def test_health_and_version(live):
    """S4, 1.1: no body; ping by either method."""
    for answer in (live.http.get("/health"), live.http.get("/ping"), live.http.post("/ping")):
        assert (answer.status_code, answer.content) == (200, b"")
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", live.http.get("/version").json()["version"])


def test_load(live):
    """S8: 0, 1 while a request runs, 0."""
    assert live.http.get("/load").json() == {"server_load": 0}
    live.lm.gate.clear()
    runner = threading.Thread(target=lambda: live.http.post(TEXT, json=live.complete(["a", "b"], n=2)))
    runner.start()
    wait_for(lambda: httpx.get(live.base + "/load").json() == {"server_load": 1})
    live.lm.gate.set()
    runner.join(5)
    assert live.http.get("/load").json() == {"server_load": 0}


def test_usage_in_every_stream(with_settings):
    """B44: in every chunk and at the end, unasked, where the operator wants it."""
    with with_settings(force_include_usage=True) as live:
        for path, body in ((CHAT, live.chat("x", max_tokens=3)), (TEXT, live.complete("x", max_tokens=3))):
            *chunks, last = live.stream(body, path)
            assert all(chunk["usage"]["prompt_tokens"] for chunk in chunks)
            assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)


@pytest.mark.parametrize("prompt", ["Hello the world", "", "🙂", "AB\n\nCD", "x" * 5000])
@pytest.mark.parametrize("special", [True, False, None])
def test_tokenize_text(live, prompt, special):
    """S22: the tokenizer's ids; no length limit applies."""
    body = {"model": "toy", "prompt": prompt, "add_special_tokens": special}
    answer = live.http.post("/tokenize", json=body).json()
    ids = live.lm.tokenizer.encode(prompt, add_special_tokens=special is not False)
    assert answer == {"count": len(ids), "max_model_len": 2048, "tokens": ids, "token_strs": None}


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("goes_on", [True, False])
def test_tokenize_chat(live, opened, goes_on):
    """S23, 1.7: the template's ids, and those that chat runs."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello"}]
    body = {"messages": messages, "add_generation_prompt": opened, "continue_final_message": goes_on}
    answer = live.http.post("/tokenize", json=body)
    if opened and goes_on:
        assert answer.status_code == 400
        return
    expected = live.lm.tokenizer.hf.apply_chat_template(
        messages, add_generation_prompt=opened, continue_final_message=goes_on, return_dict=False
    )
    assert answer.json()["tokens"] == expected
    chat = live.http.post(CHAT, json=live.chat("", **body, return_token_ids=True, max_tokens=1)).json()
    assert chat["prompt_token_ids"] == expected


def test_tokenize_with_tools(live):
    """1.7: what tools add to the prompt."""
    tools = [{"type": "function", "function": {"name": "f", "description": "does it"}}]
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools}
    ids = live.http.post("/tokenize", json=body).json()["tokens"]
    chat = live.http.post(CHAT, json=live.chat("hi", tools=tools, return_token_ids=True, max_tokens=1)).json()
    assert ids == chat["prompt_token_ids"]
    assert "does it" in live.lm.tokenizer.decode(ids)


def test_token_strings_and_back(live):
    """S25, S26: strings match ids; the text comes back."""
    text = "Hello AB 🙂 é"
    answer = live.http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["token_strs"][:3] == ["Hel", "lo", " "]
    assert len(answer["token_strs"]) == answer["count"]
    back = live.http.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": text}
    assert live.http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    "body",
    [{}, {"prompt": 5}, {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, {"messages": []}],
)
def test_malformed_tokenize(live, body):
    """1.7: exactly one of the two."""
    assert live.http.post("/tokenize", json=body).status_code == 400


@pytest.mark.parametrize("tokens", [[-1], [10**6], ["a"], None, 5, [1.5]])
def test_malformed_detokenize(live, tokens):
    """1.7: ids of the vocabulary."""
    answer = live.http.post("/detokenize", json={"tokens": tokens})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")


def test_log_has_no_prompt(live, caplog):
    """4.5: one line per request with its counts, and not a word of what was said."""
    caplog.set_level(logging.DEBUG, logger="sixstage")
    marker = live.lm.say("confidential answer")
    body = live.chat("my secret question " + marker, max_tokens=40, seed=4)
    live.http.post(CHAT, json=body, headers={"X-Request-Id": "log-test-1"})
    live.http.post(CHAT, json={**body, "stream": True}, headers={"X-Request-Id": "log-test-2"})
    wait_for(lambda: "log-test-2" in caplog.text)
    for name in ("log-test-1", "log-test-2"):
        [line] = [record.message for record in caplog.records if name in record.message]
        for fact in ("status=200", "prompt_tokens=", "cached_tokens=", "output_tokens=20", "finish=stop",
                     "ttft=", "seconds=", "seed=4", "max_tokens=40", f"path={CHAT}"):  # fmt: skip
            assert fact in line, line
    assert "secret" not in caplog.text
    assert "confidential" not in caplog.text
    live.http.get("/health", headers={"X-Request-Id": "log-test-3"})
    wait_for(lambda: "log-test-3" in caplog.text)
    [record] = [record for record in caplog.records if "log-test-3" in record.message]
    assert record.levelno == logging.DEBUG


class TestSchema:
    """S31: the document describes plain answers, chunks and errors, and samples of each fit it."""

    @pytest.fixture(scope="class")
    def document(self, live):
        return live.http.get("/openapi.json").json()

    def fits(self, document, value, schema):
        jsonschema.validate(value, {**schema, "components": document["components"]})

    @pytest.mark.parametrize("path", [CHAT, TEXT])
    def test_answers_fit(self, live, document, path):
        """S31: whole answers and chunks, with all that they can carry."""
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        make = live.chat if path == CHAT else live.complete
        scores = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2, "echo": True}
        body = make(live.lm.say("Hello 🙂"), return_token_ids=True, prompt_logprobs=0, **scores)
        plain = live.http.post(path, json=body).json()
        self.fits(document, plain, content["application/json"]["schema"])
        for chunk in live.stream({**body, "stream_options": {"include_usage": True}}, path):
            event = content["text/event-stream"]["itemSchema"]["properties"]["data"]["anyOf"][1]
            self.fits(document, chunk, event["contentSchema"]["anyOf"][0])

    def test_errors_fit(self, live, document):
        for status, answer in (
            ("400", live.http.post(CHAT, json={})),
            ("404", live.http.post(CHAT, json=live.chat("x", model="none"))),
        ):
            content = document["paths"][CHAT]["post"]["responses"][status]["content"]
            self.fits(document, answer.json(), content["application/json"]["schema"])
        assert not any(
            "422" in operation["responses"]
            for operations in document["paths"].values()
            for operation in operations.values()
        )

    def test_every_reference_leads_somewhere(self, document):
        names = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
        assert names <= set(document["components"]["schemas"])

    def test_documentation_page(self, live):
        assert "swagger" in live.http.get("/docs").text.lower()
