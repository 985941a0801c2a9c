"""Checking a learner's functions: the project's own tests, with the function at hand in the reference's place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import common
from common.course.exercises import Exercise
from common.course.exercises_cut import NoSuchFunction, is_blank, transplanted
from common.errors import SixstageError

State = Literal["passed", "failed", "not begun"]

SECONDS = 30.0
"""Time limit of one exercise: its tests take a few seconds where nothing is wrong."""

WATCHED = {
    "stage1_naive": "stage1_naive.engine:NaiveEngine._schedule",
    "stage2_kvcache": "stage2_kvcache.engine:KVCacheEngine._schedule",
    "stage3_paged": "stage3_paged.engine:PagedEngine._schedule",
    "stage4_continuous": "stage4_continuous.scheduler:Scheduler.schedule",
    "stage5_prefix_sharing": "stage5_prefix_sharing.scheduler:Scheduler.schedule",
}
"""Whose decisions a timeline shows."""


@dataclass(frozen=True)
class Outcome:
    """How one exercise stands.

    Attributes:
        state: what the check has found.
        result: the worker's answer; empty for what was not begun.
        problem: why nothing could be run, in a sentence.
    """

    exercise: Exercise
    state: State
    result: dict[str, Any]
    problem: str = ""


def check(
    exercises: Seq[Exercise], donors: dict[str, Path], pictures: Path, seconds: float = SECONDS
) -> Iterator[Outcome]:
    """Check exercises one by one.

    Args:
        exercises: which.
        donors: `Exercise.file` -> the learner's file.
        pictures: folder for pictures of failures.
        seconds: time limit of each.

    Raises:
        SixstageError: there are no tests here, or no pytest.
    """
    root = find_checkout()
    with TemporaryDirectory() as folder:
        jobs: dict[str, dict[str, Any]] = {}
        early: dict[str, Outcome] = {}
        for exercise in exercises:
            try:
                text = donors[exercise.file].read_text(encoding="utf-8")
                if is_blank(text, exercise):
                    early[exercise.id] = Outcome(exercise, "not begun", {})
                else:
                    picture = pictures / f"{exercise.id}.png"
                    jobs[exercise.id] = make_job(exercise, text, Path(folder), picture, seconds)
            except SyntaxError as error:
                problem = f"line {error.lineno}: {error.msg}"
                early[exercise.id] = Outcome(exercise, "failed", {}, problem)
            except NoSuchFunction as error:
                early[exercise.id] = Outcome(exercise, "failed", {}, str(error))
        answers = run_jobs(jobs.values(), root)
        for exercise in exercises:
            if exercise.id in early:
                yield early[exercise.id]
            else:
                result = next(answers)
                yield Outcome(exercise, "passed" if result["passed"] else "failed", result)


def make_job(
    exercise: Exercise, donor: str, folder: Path, picture: Path | None = None, seconds: float = SECONDS
) -> dict[str, Any]:
    """What a worker needs to check one function of a learner's file; see `exercises_worker.Job`.

    Raises:
        NoSuchFunction: the learner's file has no such function.
        SyntaxError: it is not Python.
    """
    text, lines, offset = transplanted(exercise.read_reference(), donor, exercise.cut)
    target = folder / f"{exercise.id}-{len(list(folder.iterdir()))}" / exercise.workspace_name
    target.parent.mkdir()
    target.write_text(text, encoding="utf-8")
    return {
        "files": {exercise.module: str(target)},
        "first": lines.first,
        "last": lines.last,
        "offset": offset,
        "tests": exercise.tests,
        "environment": {"TRITON_INTERPRET": "1"} if exercise.interpreted else {},
        "seconds": seconds,
        "picture": exercise.picture if picture is not None else "",
        "picture_file": "" if picture is None else str(picture.absolute()),  # the worker is elsewhere
        "watch": WATCHED.get(exercise.stage, "") if exercise.picture == "timeline" else "",
    }


def run_jobs(jobs: Iterable[dict[str, Any]], root: Path) -> Iterator[dict[str, Any]]:
    """Let a worker do jobs; its answers in the same order, as they come.

    Raises:
        SixstageError: the worker has ended early.
    """
    jobs = list(jobs)
    if not jobs:
        return
    settings = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # these tests need no plugin
    command = [sys.executable, "-m", "common.course.exercises_worker"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, cwd=root, env=os.environ | settings, text=True
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            worker.stdin.write(json.dumps(jobs))
            worker.stdin.close()
            for _ in jobs:
                line = worker.stdout.readline()
                if not line:
                    raise SixstageError("the checks have ended early: see the messages above")
                yield json.loads(line)
        finally:
            worker.kill()


def find_checkout() -> Path:
    """The project's folder, with the tests that check exercises.

    Raises:
        SixstageError: only the packages are installed, or pytest is not.
    """
    root = Path(str(common.__file__)).parents[1]
    if not (root / "tests" / "stage3").is_dir() or not (root / "pyproject.toml").is_file():
        raise SixstageError(
            f"exercises are checked by the project's own tests, and there are none beside {root / 'common'}: "
            "work in a checkout (git clone, then pip install -e '.[dev]' in it)"
        )
    if find_spec("pytest") is None or find_spec("hypothesis") is None:
        raise SixstageError("exercises are checked by pytest and hypothesis: pip install -e '.[dev]'")
    return root


def in_words(outcome: Outcome, path: Path) -> list[str]:
    """What a check has found, line by line, for whoever has to mend it.

    Args:
        outcome: what `check` gave.
        path: the learner's file.
    """
    found, result = outcome.exercise, outcome.result
    if outcome.state == "passed":
        return []
    if outcome.state == "not begun":
        return [f"look for TODO {found.id} in {path}"]
    if outcome.problem:
        return [f"{path}: {outcome.problem}"]
    lines = [f"in the test {result['test']}"] if "test" in result else []
    lines += [f'"{result["says"]}"'] if result.get("says") else []
    lines += _what_happened(result)
    if result.get("place"):
        number = result["place"]["line"]
        text = path.read_text(encoding="utf-8").splitlines()[number - 1].strip()
        lines.append(f"{path}, line {number}: {text}")
    if result.get("picture"):
        lines.append(f"picture of the moment: {result['picture']}")
    elif result.get("no_picture"):
        lines.append(f"no picture, the state is too broken to draw ({result['no_picture']})")
    return [*lines, f"next: sixstage exercise hint {found.id}"]


def _what_happened(result: dict[str, Any]) -> list[str]:
    if result.get("too_long"):
        return ["this did not end in time: is there a loop that never ends?"]
    lines = []
    if result.get("kind") == "AssertionError" and result["line"].startswith("assert"):
        lines.append(result["line"])
    said = result.get("error", "").splitlines()
    lines += [line for line in said if line.strip() and "Use -v to get" not in line]
    if result.get("cause"):
        lines += [f"since in the server: {result['cause']}"]
    if result.get("kind") == "NameError":
        lines.append(
            "(only the function itself is taken from your file: imports and helpers belong inside it)"
        )
    return [*lines, *result.get("example", "").splitlines()]
