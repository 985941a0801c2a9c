"""`sixstage serve` as a process: its start, its signals, its end (rows S34 to S38 of OPENAI_API.md 6.4)."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import httpx
import pytest
from support.waiting import wait_for

SMALL = ["--model", "tiny-llama", "--dtype", "float32", "--kernel", "reference", "--kv-bytes", "4MiB",
         "--max-model-len", "1024"]  # fmt: skip
KEY = "a-key"
# A tiny model answers faster than a test can send a signal, so each forward takes at least this long.
SLOW = """
import sys, time
from common.cli import main
from common.runner import ModelExecutor
run = ModelExecutor.execute
def slow(self, scheduled):
    time.sleep(0.03)
    if any(seq.params.seed == 666 for seq, _ in scheduled):
        raise RuntimeError("broken on purpose")
    return run(self, scheduled)
ModelExecutor.execute = slow
sys.exit(main(["serve", *sys.argv[1:]]))
"""


class Process:
    """A server process, what it printed, and where it listens."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-c", SLOW, *SMALL, "--port", "0", *arguments]
        self.popen = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        # Made once, which takes longer than a request.
        self.http = httpx.Client(timeout=20, headers={"Authorization": f"Bearer {KEY}"})
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        self.lines += []
        for line in self.popen.stderr:
            self.lines.append(line)

    @property
    def text(self) -> str:
        return "".join(self.lines)

    @property
    def base(self) -> str:
        return re.search(r"listening +(http://\S+?)/v1", self.text)[1]

    def ask(self, **more) -> httpx.Response:
        body = {"prompt": "a b c", "max_tokens": 20, "temperature": 0, "ignore_eos": True, **more}
        return self.http.post(f"{self.base}/v1/completions", json=body)

    def ask_in_background(self, count: int, **more) -> tuple[list, list[threading.Thread]]:
        """Answers, or the errors in their place, once the threads have ended."""
        got: list = []

        def one() -> None:
            try:
                got.append(self.ask(**more))
            except httpx.HTTPError as error:
                got.append(error)

        threads = [threading.Thread(target=one) for _ in range(count)]
        for thread in threads:
            thread.start()
        wait_for(lambda: self.http.get(f"{self.base}/load").json()["server_load"] == count)
        return got, threads


@contextmanager
def process(*arguments: str):
    server = Process(*arguments)
    try:
        wait_for(lambda: "listening" in server.text or server.popen.poll() is not None, 60)
        assert server.popen.poll() is None, server.text
        yield server
    finally:
        server.popen.kill()
        server.popen.wait()
        server.http.close()


@pytest.mark.slow
def test_start_and_end():
    """The message at the start; running requests finish after SIGTERM, new ones get 503, exit code 0 (S34, S37)."""
    with process("--served-model-name", "mine", "--api-key", KEY) as server:
        assert re.search(r"model +mine \(float32, cpu\) on stage\d_\w+", server.text)
        tokens, requests = re.search(
            r"(\d+) tokens, that is ([\d.]+) requests of the full 1024", server.text
        ).groups()
        assert float(requests) == pytest.approx(int(tokens) / 1024, abs=0.06)
        assert server.base.startswith("http://127.0.0.1:")
        wrong = {"Authorization": "Bearer wrong"}
        assert server.http.post(f"{server.base}/v1/completions", json={}, headers=wrong).status_code == 401
        got, threads = server.ask_in_background(10, max_tokens=60)
        server.popen.send_signal(signal.SIGTERM)
        wait_for(lambda: server.http.get(f"{server.base}/health").status_code == 503)
        refused = server.ask()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        for thread in threads:
            thread.join(20)
        assert [answer.json()["usage"]["completion_tokens"] for answer in got] == [60] * 10
        assert server.popen.wait(10) == 0


@pytest.mark.slow
def test_no_time_to_finish():
    """S35: with a limit of 0, or at a second signal, requests end at once, and the process within seconds."""
    for limit, signals in (("0", 1), ("60", 2)):
        with process("--shutdown-timeout", limit) as server:
            got, threads = server.ask_in_background(3, max_tokens=900)
            for _ in range(signals):
                server.popen.send_signal(signal.SIGINT)
                time.sleep(0.2)
            started = time.monotonic()
            assert server.popen.wait(10) == 0
            assert time.monotonic() - started < 8
            for thread in threads:
                thread.join(5)
            assert [answer.status_code for answer in got] == [503] * 3


@pytest.mark.slow
def test_engine_fault_ends_the_process():
    """S38: everyone who waits gets an error, and the process ends, with a code that says so."""
    with process() as server:
        got, threads = server.ask_in_background(2, max_tokens=200)
        assert server.ask(seed=666, temperature=1).status_code == 500
        for thread in threads:
            thread.join(10)
        assert [answer.status_code for answer in got] == [500, 500]
        assert server.popen.wait(10) == 1
        assert "broken on purpose" in server.text


def test_port_in_use(capsys):
    """4.3: a mistake shows before the model is loaded, as one line."""
    from common.cli import main  # noqa: PLC0415

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--model", "no-such-model", "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"sixstage: error: port: got '127.0.0.1:{port}'")
    assert error.count("\n") == 1


@pytest.mark.parametrize("arguments", [
    ["--port", "70000"], ["--api-key", ""], ["--log-level", "loud"], ["--max-num-queued-reqs", "0"],
    ["--sse-keep-alive", "-1"], ["--shutdown-timeout", "nan"], ["--max-logprobs", "-2"], ["--max-body-size", "big"],
    ["--scheduling-policy", "lifo"], ["--stage", "9"], ["--kv-bytes", "0"], ["--tool-call-parser", "none"],
])  # fmt: skip
def test_bad_options(arguments, capsys):
    """One line that names the option, before anything is loaded or listened on."""
    from common.cli import main  # noqa: PLC0415

    assert main(["serve", "--model", "no-such-model", *arguments]) == 2
    error = capsys.readouterr().err
    name = arguments[0].removeprefix("--").replace("-", "_")
    assert {"scheduling_policy": "policy"}.get(name, name) in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("arguments", "option", "value"), [
    ([], "enforce_eager", False), (["--enforce-eager"], "enforce_eager", True),
    ([], "enable_prefix_caching", True), (["--no-prefix-caching"], "enable_prefix_caching", False),
    (["--scheduling-policy", "priority"], "policy", "priority"), ([], "stage", "stage5_prefix_sharing"),
])  # fmt: skip
def test_options_reach_the_engine(arguments, option, value, monkeypatch):
    """What is switched on the command line is what the engine is built with."""
    import common.generate  # noqa: PLC0415
    import stage6_api.serve  # noqa: PLC0415
    from common.cli import main  # noqa: PLC0415

    built = []
    monkeypatch.setattr(common.generate, "LLM", lambda **options: built.append(options))
    monkeypatch.setattr(stage6_api.serve, "serve", lambda load, *_: load() or 0)
    assert main(["serve", *arguments]) == 0
    assert built[0][option] == value


def test_model_that_cannot_be_loaded(capsys):
    """One line, and the port is free again."""
    from common.cli import main  # noqa: PLC0415

    assert main(["serve", "--model", "./no-such-folder", "--port", "0"]) == 2
    assert "no-such-folder" in capsys.readouterr().err
