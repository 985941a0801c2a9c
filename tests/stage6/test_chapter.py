"""The chapter is true: every block of it runs against a live server, in order, as a reader would run it."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.waiting import wait_for

import stage6_api
from stage6_api.tools_hermes import CLOSE, OPEN
from stage6_api.tools_prompt import PREAMBLE

CHAPTER = (Path(stage6_api.__file__).parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", CHAPTER, re.MULTILINE | re.DOTALL)
URL = "http://127.0.0.1:8000"
KINDS = {"sh", "python", "text"}
START = "sixstage serve\n"


def test_every_block_is_known():
    """Nothing is left out because its language was mistyped."""
    assert CHAPTER.count("```") == 2 * len(BLOCKS)
    assert {kind for kind, _ in BLOCKS} == KINDS
    assert BLOCKS.index(("sh", START)) < min(i for i, (_, text) in enumerate(BLOCKS) if URL in text)


def test_the_preamble_is_the_one_that_models_get():
    """Word for word, with the tools' place left open."""
    shown = PREAMBLE.format(tools="...", open=OPEN, close=CLOSE)
    assert ("text", f"{shown}\n") in BLOCKS


def test_links_lead_somewhere():
    """Files beside the chapter, and elsewhere in the repository."""
    folder = Path(stage6_api.__file__).parent
    links = [link for link in re.findall(r"\]\(([^)]+)\)", CHAPTER) if "://" not in link]
    assert len(links) > 10
    for link in links:
        if not link.startswith("results/"):  # written by `sixstage bench serve`
            assert (folder / link).exists(), link


@contextlib.contextmanager
def server() -> Iterator[str]:
    """`sixstage serve` as the chapter starts it, but for the port; its URL."""
    command = [sys.executable, "-m", "stage6_api", *START.split()[2:], "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    said: list[str] = []
    threading.Thread(target=lambda: said.extend(iter(process.stderr.readline, "")), daemon=True).start()
    try:
        wait_for(lambda: "listening" in "".join(said) or process.poll() is not None, 120)
        yield re.search(r"listening +(http://\S+?)/v1", "".join(said))[1]
    finally:
        process.terminate()
        process.wait(40)


def run_shell(text: str) -> None:
    """A block of the shell: it succeeds, and prints an answer and not an error."""
    done = subprocess.run(["bash", "-ec", text], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    if "/metrics" in text:
        assert len(done.stdout.splitlines()) >= 3
    elif '"stream"' in text:
        *chunks, last = done.stdout.strip().split("\n\n")
        assert last == "data: [DONE]"
        assert json.loads(chunks[-1].removeprefix("data: "))["usage"]["completion_tokens"] == 10
    else:
        assert json.loads(done.stdout)["choices"][0]["message"]["content"]


def run_python(text: str, names: dict) -> None:
    """A block of Python, after those before it; a comment behind a print is what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(text, "README.md", "exec", dont_inherit=True), names)
    for line in re.findall(r"^print\(.*\)  # (.*)$", text, re.MULTILINE):
        assert line in printed.getvalue().splitlines()


@pytest.mark.model135
@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("bash")), reason="needs curl and bash")
def test_every_block_runs():
    """Copied and pasted, with the address of a server that is there."""
    names: dict = {"__name__": "__main__"}
    with server() as base:
        for kind, text in BLOCKS:
            if kind == "sh" and text != START:
                run_shell(text.replace(URL, base))
            elif kind == "python":
                run_python(text.replace(URL, base), names)
    assert names["message"].content
    # Prompt and answer of the first turn are about 100 tokens; the story may read otherwise on another machine.
    assert names["usage"].prompt_tokens_details.cached_tokens >= 64
