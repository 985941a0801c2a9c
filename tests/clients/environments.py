"""A throw-away home for each client, so that their dependencies cannot clash, with each other or with ours."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
INSTALL_SECONDS, RUN_SECONDS = 400, 60


@dataclass(frozen=True)
class Client:
    """One client: its packages and the script that drives it."""

    script: str
    packages: tuple[str, ...]

    @property
    def is_node(self) -> bool:
        """Whether it comes from npm; else it comes from pip."""
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
            script = shutil.copy(HERE / client.script, home)
            command = ["node", str(script)]
        else:
            command = [str(home / "bin" / "python"), str(HERE / client.script)]
        done = subprocess.run(
            [*command, json.dumps(argument)],
            capture_output=True,
            check=False,
            text=True,
            timeout=RUN_SECONDS,
            cwd=home,
        )
        assert done.returncode == 0, f"{name} failed:\n{done.stderr[-4000:]}"
        return json.loads(done.stdout.splitlines()[-1])

    def close(self) -> None:
        """Forget what has not been begun."""
        self._pool.shutdown(cancel_futures=True)

    def _make(self, name: str) -> Path:
        client = CLIENTS[name]
        wanted = hashlib.sha256(repr((client.packages, sys.version)).encode()).hexdigest()[:12]
        home = self._folder / f"{name}-{wanted}"
        if not (home / "complete").exists():
            shutil.rmtree(home, ignore_errors=True)
            home.mkdir(parents=True)
            if client.is_node:
                (home / "package.json").write_text('{"private": true}')
                _call("npm", "install", "--no-audit", "--no-fund", *client.packages, cwd=home)
            else:
                _call(sys.executable, "-m", "venv", str(home), cwd=home)
                pip = (str(home / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check")
                _call(*pip, "--no-compile", *client.packages, cwd=home)
            (home / "complete").touch()
        return home


def _call(*command: str, cwd: Path) -> None:
    done = subprocess.run(
        command, capture_output=True, check=False, text=True, cwd=cwd, timeout=INSTALL_SECONDS
    )
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{(done.stderr or done.stdout)[-4000:]}"
