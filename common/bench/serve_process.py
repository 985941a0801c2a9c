"""A server in a process of its own, for as long as a block lasts."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from common.bench.job import Job
from common.errors import SixstageError
from common.stages import SERVER

START_SECONDS, END_SECONDS = 120.0, 15.0


@dataclass(frozen=True)
class ServerProcess:
    """A server that is ready.

    Attributes:
        base: its URL, without /v1.
        pid: its process id.
    """

    base: str
    pid: int


def server_arguments(job: Job) -> list[str]:
    """The options of `sixstage serve` that make it serve with the engine of this job."""
    options = {
        "--stage": job.stage,
        "--model": job.model,
        "--dtype": job.dtype,
        "--kv-bytes": job.kv_bytes,
        "--max-model-len": job.max_model_len,
        "--max-num-seqs": job.max_num_seqs,
        "--block-size": job.block_size,
        "--kernel": job.kernel,
    }
    given = [text for option, value in options.items() for text in (option, str(value))]
    return given if job.enable_prefix_caching else [*given, "--no-prefix-caching"]


@contextmanager
def server_process(*arguments: str) -> Iterator[ServerProcess]:
    """Start `sixstage serve` on a free port, wait until it listens, and end it after the block.

    Raises:
        SixstageError: it did not start; with its last words.
    """
    command = [sys.executable, "-m", SERVER, *arguments, "--port", "0", "--log-level", "warning"]
    with tempfile.TemporaryFile("w+") as said:
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said)
        try:
            yield ServerProcess(_wait_for_url(child, said), child.pid)
        finally:
            child.terminate()
            try:
                child.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _wait_for_url(child: subprocess.Popen[bytes], said: IO[str]) -> str:
    """The address that the server announces."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        said.seek(0)
        text = said.read()
        if found := re.search(r"^listening +(\S+)/v1", text, re.MULTILINE):
            return found[1]
        if child.poll() is not None:
            last = text.strip().rpartition("\n")[2] or "it said nothing"
            raise SixstageError(f"the server ended with exit code {child.returncode}: {last}")
        time.sleep(0.05)
    raise SixstageError(f"the server was not ready after {START_SECONDS:.0f} s")
