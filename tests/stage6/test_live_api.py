"""`/live` over HTTP: off by default, behind the key, free while nobody looks, and never in the engine's way."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
from support.engines import build
from support.live_server import NEWEST, SETTINGS, serve
from support.scripted_lm import ScriptedLM
from support.waiting import wait_for

from common.course.pictures.palette import REQUESTS
from stage6_api import live_view
from stage6_api.async_engine import AsyncEngine, Limits
from stage6_api.live_view import LiveView
from stage6_api.metrics import EngineMetrics
from stage6_api.sse import named_frame

TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def server():
    """One server with a live view for all tests of the file."""
    with serve(replace(SETTINGS, live=True)) as live:
        yield live


@contextmanager
def watching(live, headers=None):
    """The events of an open stream, as an iterator of (type, data)."""
    with live.http.stream("GET", "/live/events", headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        yield parsed(answer.iter_lines())
    wait_for(lambda: live.served.engine.between_steps is None)


def parsed(lines):
    kind = ""
    for line in lines:
        if line.startswith("event: "):
            kind = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield kind, json.loads(line.removeprefix("data: "))


def until(events, condition):
    """The first snapshot for which the condition holds."""
    return next(data for kind, data in events if kind == "step" and condition(data))


def test_off_by_default(live):
    """There is nothing at /live unless the operator asks for it."""
    for answer in (live.http.get("/live"), live.http.get("/live/events"),
                   live.http.post("/live/pace", json={"seconds": 0})):  # fmt: skip
        assert answer.status_code == 404
        assert answer.json()["error"]["type"] == "NotFoundError"


def test_behind_the_key(with_settings):
    """The page holds nothing to protect and can be opened to type a key in; all data wants one."""
    with with_settings(live=True, api_keys=("secret",)) as live:
        assert live.http.get("/live").status_code == 200
        assert live.http.get("/live/events").status_code == 401
        assert live.http.get("/live/events?key=secret").status_code == 401
        assert live.http.post("/live/pace", json={"seconds": 0}).status_code == 401
        with watching(live, {"Authorization": "Bearer secret"}) as events:
            assert next(events)[0] == "engine"


def test_page_is_whole(server):
    """One file without a link elsewhere; its policy would not let it load anything either."""
    answer = server.http.get("/live")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "{{" not in answer.text.replace("${{", "")
    for name in ("src=", "http://", "https://", "@import", "url("):
        assert name not in answer.text


def test_colours_are_those_of_the_pictures(server):
    """A request has the same colour here as in the chapters."""
    assert json.dumps(list(REQUESTS)) in server.http.get("/live").text


def test_what_a_viewer_sees(server):
    """First what the engine is, then its state as a request comes, grows, ends, and stays cached."""
    with watching(server) as events:
        kind, about = next(events)
        assert (kind, about["memory"], about["shares"]) == ("engine", "blocks", True)
        assert (about["cell"], about["slots"]) == (4, 16)
        seen = until(events, lambda seen: True)
        assert (seen["running"], seen["waiting"]) == ([], [])
        emitted, ended = seen["counts"]["emitted"], []
        body = server.complete("Hello the world", max_tokens=30, ignore_eos=True, temperature=0)
        server.lm.delay = 0.01
        asking = threading.Thread(target=lambda: ended.append(server.http.post(TEXT, json=body)))
        asking.start()
        seen = until(events, lambda seen: seen["running"] and seen["running"][0]["tokens"] > 30)
        [seq] = seen["running"]
        assert len(seq["blocks"]) == -(-seq["computed"] // 4)
        assert seen["reserved"] == 4 * len(seq["blocks"])
        seen = until(events, lambda seen: not seen["running"])
        assert seen["counts"]["emitted"] == emitted + 30
        assert set(seq["blocks"][:2]) <= set(seen["cached"])
        asking.join(5)
        server.lm.delay = 0.0
        assert ended[0].status_code == 200


def test_costs_nothing_unwatched(server, monkeypatch):
    """Nobody is called, and no event is written down, before the first viewer and after the last."""
    calls = []
    monkeypatch.setattr(LiveView, "_look", lambda self, engine: calls.append(1))
    pool = server.engine.kv.blocks.pool
    assert server.http.post(TEXT, json=server.complete("x", max_tokens=5)).status_code == 200
    assert (calls, pool.events, server.served.engine.between_steps) == ([], None, None)
    with watching(server) as events:
        next(events)
        wait_for(lambda: calls)
    wait_for(lambda: pool.events is None)
    del calls[:]
    assert server.http.post(TEXT, json=server.complete("x", max_tokens=5)).status_code == 200
    assert calls == []


def test_a_slow_viewer_holds_nobody_up(server):
    """Requests are answered while nobody reads the events; the last state is there when somebody does."""
    with watching(server) as events:
        next(events)
        before = server.engine.stats.sequences_finished
        body = server.complete(["a", "b", "c"], max_tokens=120, ignore_eos=True)
        assert server.http.post(TEXT, json=body).status_code == 200
        until(events, lambda seen: seen["counts"]["finished"] == before + 3 and not seen["running"])


def test_only_the_newest_is_kept():
    """Of snapshots that a viewer has not got yet, whatever their number; a fast one beside it gets each."""

    async def look() -> None:
        lm = ScriptedLM()
        inner = build(NEWEST, lm)
        engine = AsyncEngine(inner, lm.tokenizer, EngineMetrics("toy", inner), Limits())
        view = LiveView(engine, {})
        slow, fast = view.join(), view.join()
        for step in range(50):
            view.publish({"step": step})
            assert fast.get_nowait() == named_frame({"type": "step", "step": step})
        assert slow.get_nowait() == named_frame({"type": "step", "step": 49})
        assert slow.empty()

    asyncio.run(look())


@pytest.mark.parametrize("seconds", [-0.1, 2.1, True, "1", None, [0]])
def test_pace_out_of_range(server, seconds):
    """400 that names the field, and nothing changes."""
    answer = server.http.post("/live/pace", json={"seconds": seconds})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "seconds")


def test_pace_belongs_to_viewers(server):
    """409 without one; with one, steps keep their distance; with the last it is gone."""
    assert server.http.post("/live/pace", json={"seconds": 0.1}).status_code == 409
    with watching(server) as events:
        next(events)
        assert server.http.post("/live/pace", json={"seconds": 0.1}).json() == {"seconds": 0.1}
        until(events, lambda seen: seen["pace"] == 0.1)
        asking = threading.Thread(
            target=lambda: server.http.post(TEXT, json=server.complete("x", max_tokens=6, ignore_eos=True))
        )
        asking.start()
        until(events, lambda seen: seen["waiting"])  # an idle engine pauses too, so the queue is seen
        times = [until(events, lambda seen: seen["running"])["time"] for _ in range(4)]
        asking.join(5)
        gaps = [b - a for a, b in itertools.pairwise(times)]
        assert min(gaps) > 0.09, gaps
    before = len(server.lm.forwards)
    answer = server.http.post(TEXT, json=server.complete("x", max_tokens=100, ignore_eos=True), timeout=5)
    assert answer.status_code == 200  # at the pace it had, this would take ten seconds
    assert len(server.lm.forwards) - before >= 100
    with watching(server) as events:
        assert until(events, lambda seen: True)["pace"] == 0


def test_a_pace_lets_requests_in_between(server):
    """While a step is held back, what comes is seen in the queue at once, and what leaves is gone."""
    with watching(server) as events:
        next(events)
        server.http.post("/live/pace", json={"seconds": 2})
        bodies = [server.complete(text, max_tokens=3) for text in ("one", "two")]
        threads = [threading.Thread(target=lambda b=b: server.http.post(TEXT, json=b)) for b in bodies]
        for thread in threads:
            thread.start()
        assert until(events, lambda seen: seen["num_waiting"] == 2)["running"] == []
        server.http.post("/live/pace", json={"seconds": 0})
        for thread in threads:
            thread.join(5)


def test_a_fault_of_the_view_is_not_the_engines(server, monkeypatch):
    """The stream ends, and requests are answered as if nothing had been."""

    def fail(engine):
        raise RuntimeError("broken on purpose")

    with server.http.stream("GET", "/live/events") as answer:
        events = parsed(answer.iter_lines())
        next(events)
        monkeypatch.setattr(live_view, "snapshot", fail)
        assert server.http.post(TEXT, json=server.complete("x", max_tokens=5)).status_code == 200
        assert [kind for kind, _ in events if kind != "step"] == []
    assert server.served.engine.failure is None
    assert server.engine.kv.blocks.pool.events is None


def test_frames_are_one_line_each():
    """A request id is the server's own, but a model's name is the operator's: no name breaks a frame."""
    frame = named_frame({"type": "engine", "model": "a\n\nb"})
    assert frame.count(b"\n\n") == 1
