"""A client that leaves is worked for no longer (OPENAI_API.md 2.7; section 7 row 37)."""

from __future__ import annotations

import threading

import httpx
import pytest
from support.waiting import wait_for

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def endless(live):
    """A body whose answer takes 2,000 steps of 5 ms; the engine holds nothing when the test is over."""
    live.lm.delay = 0.005
    yield live.chat("x", ignore_eos=True)
    live.lm.gate.set()
    live.lm.delay = 0.0
    live.wait_idle()
    assert live.engine.kv.usage().used == 0 or live.engine.capabilities.shares_prefixes
    assert live.engine.sequences() == []


def steps_after(live, leave):
    """Forwards that begin after the client has left and until the engine holds nothing."""
    leave()
    before = len(live.lm.forwards)
    live.wait_idle()
    return len(live.lm.forwards) - before


@pytest.mark.parametrize("more", [{}, {"n": 3, "temperature": 1}])
def test_stream_is_left(live, endless, more):
    """The request and all of its n answers end within two steps of the server's seeing it."""
    with httpx.Client(base_url=live.base) as http:
        stream = http.stream("POST", CHAT, json={**endless, **more, "stream": True})
        answer = stream.__enter__()
        lines = answer.iter_lines()
        for _ in range(10):
            next(lines)
        # A few more than two steps: the closed socket must be noticed first.
        assert steps_after(live, lambda: (answer.close(), http.close())) <= 6


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_plain_call_is_left(live, endless, path):
    """Nobody touches its socket, so somebody must watch it."""
    body = endless if path == CHAT else live.complete(["x", "y"], ignore_eos=True, max_tokens=2000)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(live.base + path, json=body, timeout=0.2)
    before = len(live.lm.forwards)
    live.wait_idle()
    assert len(live.lm.forwards) - before <= 6


@pytest.mark.parametrize("stream", [False, True])
def test_left_before_the_first_token(live, endless, stream):
    """While the first forward is still under way."""
    live.lm.gate.clear()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(live.base + CHAT, json={**endless, "stream": stream}, timeout=0.2)
    wait_for(lambda: live.served.engine.num_live_jobs == 0)
    before = len(live.lm.forwards)
    live.lm.gate.set()
    live.wait_idle()
    assert len(live.lm.forwards) - before <= 2


def test_left_in_the_queue(with_settings):
    """A request that never ran leaves no trace; the one that runs is not disturbed."""
    with with_settings(engine={"max_num_seqs": 1}) as live:
        live.lm.delay = 0.01
        script = live.chat(live.lm.say("Hello " * 20))
        texts = []
        runner = threading.Thread(target=lambda: texts.append(live.http.post(CHAT, json=script).json()))
        runner.start()
        wait_for(lambda: live.served.engine.num_live_jobs == 1)
        for _ in range(5):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(live.base + CHAT, json=live.chat("y", ignore_eos=True), timeout=0.05)
        wait_for(lambda: live.served.engine.num_live_jobs == 1)
        runner.join(10)
        assert texts[0]["choices"][0]["message"]["content"] == "Hello " * 20
        live.wait_idle()


def test_two_hundred_leave_and_the_next_is_served(live, endless):
    """As in vLLM: after 200 timeouts an answer comes within five seconds."""
    unlimited = httpx.Limits(max_connections=None)
    with httpx.Client(base_url=live.base, timeout=0.3, limits=unlimited) as http:

        def leave() -> None:
            with pytest.raises(httpx.TimeoutException):
                http.post(CHAT, json=endless)

        threads = [threading.Thread(target=leave) for _ in range(200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    answer = live.http.post(CHAT, json=live.chat(live.lm.say("Hello")), timeout=5)
    assert answer.json()["choices"][0]["message"]["content"] == "Hello"


def test_next_turn_after_a_stopped_one(live, endless):
    """Section 7, row 37: no token of the old turn reaches the new one."""
    long = live.lm.say("old words " * 100)
    body = live.chat(long, stream=True)
    with httpx.Client(base_url=live.base) as http, http.stream("POST", CHAT, json=body) as answer:
        next(answer.iter_lines())
    turns = [
        {"role": "user", "content": long},
        {"role": "assistant", "content": "old words"},
        {"role": "user", "content": live.lm.say("new words")},
    ]
    answer = live.http.post(CHAT, json=live.chat("", messages=turns)).json()
    assert answer["choices"][0]["message"]["content"] == "new words"


def test_ending_and_leaving_at_once(live):
    """The abort/finish race: whatever wins, nothing stays behind."""
    body = live.chat(live.lm.say("AB"), stream=True)
    for pieces in range(12):
        with httpx.Client(base_url=live.base) as http, http.stream("POST", CHAT, json=body) as answer:
            for _, _line in zip(range(pieces), answer.iter_lines(), strict=False):
                pass
    live.wait_idle()
    assert live.metric("vllm:num_requests_running") == 0
