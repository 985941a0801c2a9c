"""The process: bind the port, load the model, say what is served, and end in good order.

SIGTERM or Ctrl-C   /health turns 503, new requests get 503, running ones have `shutdown_timeout` seconds
a second one        running ones are taken back at once
an engine fault     everyone who waits gets an error, and the process ends with exit code 1
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from threading import Thread
from types import FrameType
from typing import Any

import uvicorn

from common.errors import InvalidValue
from common.generate import LLM
from stage6_api.errors import overloaded
from stage6_api.served import Served, Settings
from stage6_api.server import Application
from stage6_api.stats_line import report_forever

log = logging.getLogger("sixstage.server")

MAX_HEADERS = 64 << 10  # bytes
ENGINE_FAULT = 1


def serve(load: Callable[[], LLM], settings: Settings, host: str, port: int, log_level: str = "info") -> int:
    """Serve until a signal comes; returns the exit code.

    Args:
        load: makes the model ready; called in a thread, after the port is ours.
        settings: the operator's choices.
        host: name or address to listen on.
        port: 0 takes a free one.
        log_level: debug, info, warning or error.

    Raises:
        InvalidValue: the port cannot be had.
        SixstageError: the model cannot be loaded.
    """
    listener = _bind(host, port)
    logging.basicConfig(
        level=log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    server = Server(Application(settings), settings, log_level)
    return asyncio.run(server.run_until_told(listener, load))


def _bind(host: str, port: int) -> socket.socket:
    """Take the port before the long work, so that a mistake shows at once."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidValue(
            "port", f"{host}:{port}", f"an address that can be listened on ({reason})"
        ) from error


class Server(uvicorn.Server):
    """uvicorn, but for what a signal does.

    uvicorn would close the door at once and then wait for open streams for ever; here the door stays open,
    and whoever comes is told to come back later.
    """

    def __init__(self, app: Application, settings: Settings, log_level: str) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,  # ours has the ids and the counts
                timeout_graceful_shutdown=2,
                http="h11",  # the other one, if it is installed, takes headers of any size
                h11_max_incomplete_event_size=MAX_HEADERS,
            )
        )
        self._app = app
        self._settings = settings
        self._signals = 0
        self._ending = asyncio.Event()
        self._at_once = asyncio.Event()
        self._exit_code = 0

    async def run_until_told(self, listener: socket.socket, load: Callable[[], LLM]) -> int:
        """Listen, load, serve, drain; returns the exit code."""
        self._loop = asyncio.get_running_loop()
        serving = asyncio.create_task(self.serve(sockets=[listener]))
        work = asyncio.create_task(self._load_and_watch(listener, load))
        await asyncio.wait({serving, work}, return_when=asyncio.FIRST_COMPLETED)
        self.should_exit = True
        await serving
        if work.done():
            work.result()  # raises what loading has raised
        return self._exit_code

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal has come; uvicorn calls this in the main thread, outside the loop."""
        self._signals += 1
        first = self._signals == 1
        self._loop.call_soon_threadsafe((self._ending if first else self._at_once).set)

    async def _load_and_watch(self, listener: socket.socket, load: Callable[[], LLM]) -> None:
        loading = _in_thread(load)
        ending = asyncio.ensure_future(self._ending.wait())
        either: list[asyncio.Future[Any]] = [loading, ending]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            return  # told to end before the model was there
        llm = loading.result()
        served = Served(llm.engine, llm.tokenizer, llm.stage, self._settings)
        self._app.serve(served)
        print(announcement(llm, served, listener), file=sys.stderr, flush=True)
        statistics = asyncio.create_task(report_forever(served))
        while served.engine.failure is None and not self._ending.is_set():
            await asyncio.wait({ending}, timeout=0.1)
        statistics.cancel()
        if served.engine.failure is not None:
            self._exit_code = ENGINE_FAULT
            return
        await self._drain(served)

    async def _drain(self, served: Served) -> None:
        """Let running requests finish, within the limit and until a second signal."""
        log.info("ending: %d calls are still running", served.engine.num_live_jobs)
        draining = asyncio.create_task(served.engine.drain(self._settings.shutdown_timeout))
        at_once = asyncio.create_task(self._at_once.wait())
        await asyncio.wait({draining, at_once}, return_when=asyncio.FIRST_COMPLETED)
        served.engine.fail_all(overloaded("The server is shutting down.", retry_after=5))
        for task in (draining, at_once):
            task.cancel()


def _in_thread(load: Callable[[], LLM]) -> asyncio.Future[LLM]:
    """Load in a thread that nobody waits for if the process is told to end meanwhile."""
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[LLM] = loop.create_future()

    def work() -> None:
        try:
            llm = load()
        except BaseException as error:
            loop.call_soon_threadsafe(loaded.set_exception, error)
        else:
            loop.call_soon_threadsafe(loaded.set_result, llm)

    Thread(target=work, name="loading", daemon=True).start()
    return loaded


def announcement(llm: LLM, served: Served, listener: socket.socket) -> str:
    """What was loaded, what fits, and where it is."""
    config, model, usage = llm.config, llm.model, llm.engine.kv.usage()
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    weights = str(model.dtype).removeprefix("torch.")
    return "\n".join(
        [
            f"model      {', '.join(served.settings.served_model_names)} ({weights}, {model.device}) on {llm.stage}",
            f"KV memory  {config.kv_bytes / 2**20:.0f} MiB: {usage.capacity} tokens, that is "
            f"{usage.capacity / served.max_len:.1f} requests of the full {served.max_len} tokens",
            f"batch      up to {config.max_num_seqs} sequences and {config.max_num_batched_tokens} tokens per step",
            f"listening  http://{host}:{port}/v1 (documentation: http://{host}:{port}/docs)",
            *([f"live view  http://{host}:{port}/live"] if served.settings.live else []),
        ]
    )
