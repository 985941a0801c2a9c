"""Running the command line in this process."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import NamedTuple

import pytest

from common.cli import main


class Outcome(NamedTuple):
    """What one command left behind."""

    code: int
    out: str
    err: str


Sixstage = Callable[..., Outcome]


@pytest.fixture
def sixstage(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Sixstage:
    """`sixstage("diff", "1", "2")` runs the command; `stdin=` is what it reads."""
    monkeypatch.delenv("SIXSTAGE_DEBUG", raising=False)
    monkeypatch.setenv("COLUMNS", "200")  # no message is folded

    def run(*words: str, stdin: str = "") -> Outcome:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        capsys.readouterr()
        code = main(list(words))
        return Outcome(code, *capsys.readouterr())

    return run
