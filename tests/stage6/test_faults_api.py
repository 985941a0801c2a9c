"""What clients see when the engine fails, is full, or ends (OPENAI_API.md 2.7, 4.2, 4.4)."""

from __future__ import annotations

import asyncio
import json
import threading

import httpx
import openai
import pytest
from support.waiting import wait_for

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def events(answer):
    """The parsed events of a stream that ends in [DONE]."""
    *frames, done, _ = answer.text.split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames if not frame.startswith(":")]


def test_one_bad_row_of_logits_ends_one_request(with_settings, stage):
    """NaN for one request: 500 for its client, and the others get what they would have got anyway."""
    with with_settings(stage) as live:
        seeded = {"temperature": 1, "seed": 5, "max_tokens": 12, "ignore_eos": True}
        alone = live.http.post(TEXT, json=live.complete("random", **seeded)).json()["choices"][0]["text"]
        live.lm.delay = 0.01
        texts = {}

        def ask(name, prompt, **more):
            texts[name] = httpx.post(live.base + TEXT, json=live.complete(prompt, **more), timeout=20)

        threads = [
            threading.Thread(target=ask, args=("good", "random"), kwargs=seeded),
            threading.Thread(target=ask, args=("bad", live.lm.say("A" * 20, poison_at=3))),
            threading.Thread(target=ask, args=("greedy", live.lm.say("Hello the world"))),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert texts["bad"].status_code == 500
        assert texts["bad"].json()["error"]["type"] == "InternalServerError"
        assert texts["bad"].headers["x-should-retry"] == "false"
        assert texts["good"].json()["choices"][0]["text"] == alone
        assert texts["greedy"].json()["choices"][0]["text"] == "Hello the world"
        assert live.http.get("/health").status_code == 200
        live.wait_idle()


def test_bad_logits_in_a_stream(live):
    """A43, B47, section 7 row 17: an error object as the last event, then [DONE]; every client raises."""
    marker = live.lm.say("Hello AB", poison_at=2)
    for path, body in ((CHAT, live.chat(marker, stream=True)), (TEXT, live.complete(marker, stream=True))):
        *chunks, last = events(live.http.post(path, json=body))
        assert set(last) == {"error"}
        assert last["error"]["type"] == "InternalServerError"
        assert set(last["error"]) == {"message", "type", "param", "code"}
        assert chunks
        assert all("error" not in chunk for chunk in chunks)
    with pytest.raises(openai.APIError, match="engine failed"):
        for _ in live.openai.chat.completions.create(**live.chat(marker), stream=True):
            pass
    first = live.lm.say("x", poison_at=0)
    [only] = events(live.http.post(CHAT, json=live.chat(first, stream=True)))
    assert set(only) == {"error"}


def test_engine_fault(with_settings):
    """A44, S5, S38: 500 once for everyone who waits, /health 503, later requests 500, nothing hangs."""
    with with_settings() as live:
        live.lm.gate.clear()
        got = {}

        def ask(name, path, body):
            got[name] = httpx.post(live.base + path, json=body, timeout=10)

        work = {
            "plain": (CHAT, live.chat("x")),
            "stream": (CHAT, live.chat("x", stream=True)),
            "text": (TEXT, live.complete(["a", "b"], n=2)),
        }
        threads = [threading.Thread(target=ask, args=(name, *what)) for name, what in work.items()]
        for thread in threads:
            thread.start()
        wait_for(lambda: live.served.engine.num_live_jobs == 3)
        live.lm.failure = RuntimeError("/secret/path: the device is on fire")
        live.lm.gate.set()
        for thread in threads:
            thread.join(10)
        assert got["plain"].status_code == got["text"].status_code == 500
        assert "secret" not in got["plain"].text
        assert events(got["stream"])[-1]["error"]["type"] == "InternalServerError"
        assert live.http.get("/health").status_code == 503
        assert live.http.get("/ping").status_code == 503
        later = live.http.post(CHAT, json=live.chat("x"))
        assert later.status_code == 500
        assert later.headers["x-should-retry"] == "false"
        assert live.served.engine.num_live_jobs == 0


@pytest.mark.parametrize("limits", [{"max_num_queued_reqs": 3}, {"max_num_queued_tokens": 30}])
def test_full_queue(with_settings, limits):
    """B48, 4.4: 503 with Retry-After before any 200, plain and stream; n counts n times; room comes back."""
    from stage6_api.async_engine import Limits  # noqa: PLC0415

    with with_settings(limits=Limits(**limits)) as live:
        live.lm.gate.clear()
        prompt = "ab" if "max_num_queued_reqs" in limits else "a" * 15
        body = live.complete(prompt, n=2, max_tokens=2)
        answers = []
        running = threading.Thread(target=lambda: answers.append(live.http.post(TEXT, json=body)))
        running.start()
        wait_for(lambda: live.served.engine.num_live_jobs == 1)
        big = live.complete([prompt, prompt], max_tokens=1)
        for stream in (False, True):
            refused = httpx.post(live.base + TEXT, json={**big, "stream": stream})
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["type"] == "Service Unavailable"
        assert live.metric("vllm:admission_rejections_total", reason="queue_full") == 2
        live.lm.gate.set()
        running.join(10)
        assert answers[0].status_code == 200
        assert live.http.post(TEXT, json=live.complete(prompt, max_tokens=1)).status_code == 200


def test_official_client_retries_a_full_queue(with_settings):
    """1.4: a 503 with Retry-After is sent again by itself."""
    from stage6_api.async_engine import Limits  # noqa: PLC0415

    with with_settings(limits=Limits(max_num_queued_reqs=1)) as live:
        live.lm.gate.clear()
        threading.Thread(target=lambda: live.http.post(TEXT, json=live.complete("a", max_tokens=1))).start()
        wait_for(lambda: live.served.engine.num_live_jobs == 1)
        threading.Timer(0.3, live.lm.gate.set).start()
        answer = live.openai.with_options(max_retries=2).completions.create(
            **live.complete("b", max_tokens=1)
        )
        assert answer.choices


def test_draining(with_settings):
    """4.2, S34, S37: what runs may finish; new ones get a 503, and /health says so."""
    with with_settings() as live:
        live.lm.delay = 0.02
        marker = live.lm.say("Hello " * 10)
        got = []
        running = threading.Thread(target=lambda: got.append(live.http.post(CHAT, json=live.chat(marker))))
        running.start()
        wait_for(lambda: live.served.engine.num_live_jobs == 1)
        loop = live.served.engine._loop
        draining = asyncio.run_coroutine_threadsafe(live.served.engine.drain(10), loop)
        wait_for(lambda: live.served.engine.draining)
        refused = httpx.post(live.base + CHAT, json=live.chat("x"))
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert httpx.get(live.base + "/health").status_code == 503
        draining.result(10)
        running.join(10)
        assert got[0].json()["choices"][0]["message"]["content"] == "Hello " * 10


def test_drain_ends_at_its_limit(with_settings):
    """S35: what has not finished by then gets an error, once, and its memory is free."""
    with with_settings() as live:
        live.lm.delay = 0.01
        got = []
        body = live.chat("x", ignore_eos=True, stream=True)
        running = threading.Thread(target=lambda: got.append(live.http.post(CHAT, json=body)))
        running.start()
        wait_for(lambda: live.served.engine.num_live_jobs == 1)
        loop = live.served.engine._loop
        asyncio.run_coroutine_threadsafe(live.served.engine.drain(0.1), loop).result(5)
        running.join(5)
        last = events(got[0])[-1]
        assert last["error"]["type"] == "Service Unavailable"
        live.wait_idle()


def test_slow_first_token_gets_keep_alive_comments(with_settings):
    """2.1: a proxy must not take a long prompt for a dead connection; the client ignores the lines."""
    with with_settings(keep_alive_seconds=0.05) as live:
        live.lm.gate.clear()
        threading.Timer(0.4, live.lm.gate.set).start()
        answer = live.http.post(CHAT, json=live.chat(live.lm.say("Hello"), stream=True))
        assert answer.text.count(": keep-alive\n\n") >= 3
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in events(answer)) == "Hello"
        live.lm.gate.clear()
        threading.Timer(0.2, live.lm.gate.set).start()
        stream = live.openai.chat.completions.create(**live.chat(live.lm.say("Hello")), stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Hello"
