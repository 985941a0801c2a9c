"""A live server over a scripted model: real HTTP, real engine, exact texts."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import openai
import uvicorn
from support.engines import build
from support.scripted_lm import ScriptedLM

from common.protocol import Engine
from common.stages import STAGES, find_stage
from stage6_api.served import Served, Settings
from stage6_api.server import Application

NAME = "toy"
NEWEST = [name for name, stage in STAGES.items() if stage.number < 6][-1]
SETTINGS = Settings(served_model_names=(NAME, "org/alias"))


@dataclass
class Live:
    """A server on a free port of this machine.

    Attributes:
        lm: says what a test wants: `lm.say(text)` gives the marker to put into a prompt.
        base: its URL, without /v1.
        http: a client whose base URL it is.
        openai: the official client.
    """

    lm: ScriptedLM
    engine: Engine
    served: Served
    base: str
    http: httpx.Client
    openai: openai.OpenAI

    def chat(self, text: str, **more: object) -> dict:
        """A greedy chat request's body, with one user message."""
        messages = [{"role": "user", "content": text}]
        return {"model": NAME, "messages": messages, "temperature": 0, **more}

    def complete(self, prompt: object, **more: object) -> dict:
        """A greedy completions request's body."""
        return {"model": NAME, "prompt": prompt, "temperature": 0, **more}

    def stream(self, body: dict, path: str = "/v1/chat/completions") -> list[dict]:
        """The events of a stream, its frames checked: a line of JSON each, an empty line, [DONE] at the end."""
        answer = self.http.post(path, json={**body, "stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache"
        *frames, done, rest = answer.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        assert all(frame.startswith("data: {") and "\n" not in frame for frame in frames)
        return [json.loads(frame.removeprefix("data: ")) for frame in frames]

    def metric(self, name: str, **labels: str) -> float:
        """A metric's value now; 0 if it has never been counted."""
        found = self.served.metrics.registry.get_sample_value(
            name, {"model_name": NAME, "engine": "0", **labels}
        )
        return found or 0.0

    def wait_idle(self, seconds: float = 5.0) -> None:
        """Until the engine holds nothing, by its own gauges; fails if that does not come about."""
        end = time.monotonic() + seconds
        names = ("num_requests_running", "num_requests_waiting")
        while any(self.metric(f"vllm:{name}") for name in names) or self.served.engine.num_live_jobs:
            assert time.monotonic() < end, "something is still running"
            time.sleep(0.01)
        assert not self.engine.has_unfinished()


@contextmanager
def serve(settings: Settings = SETTINGS, stage: str = NEWEST, **engine_options: object) -> Iterator[Live]:
    """Run a server for as long as the block lasts."""
    lm = ScriptedLM()
    options = {"kv_tokens": 8192, "max_model_len": 2048, "max_num_batched_tokens": 2048} | engine_options
    engine = build(stage, lm, **options)
    served = Served(engine, lm.tokenizer, find_stage(stage)[0], settings)
    config = uvicorn.Config(Application(settings, served), port=0, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.005)
    base = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    key = settings.api_keys[0] if settings.api_keys else "EMPTY"
    with (
        httpx.Client(base_url=base, timeout=20) as http,
        openai.OpenAI(base_url=f"{base}/v1", api_key=key, timeout=20, max_retries=0) as client,
    ):
        yield Live(lm, engine, served, base, http, client)
    lm.gate.set()
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()
