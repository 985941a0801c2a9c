"""Every exercise: its blank fails, the reference passes, and at least two plausible wrong answers fail."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from common.course.exercises import COURSE, Exercise, listing
from common.course.exercises_check import find_checkout, make_job, run_jobs
from common.course.exercises_cut import blanked, function_lines, marker, transplanted
from common.stages import find_number

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

WRONG = Path(__file__).with_name("wrong_answers")
ALL = [exercise for stage in COURSE for exercise in listing(stage)]


def wrong_answers(stage: str) -> dict[str, list[dict[str, str]]]:
    """Exercise -> what to change in the reference to get a wrong answer, and why it is wrong."""
    return tomllib.loads((WRONG / f"stage{find_number(stage)}.toml").read_text(encoding="utf-8"))


def changed(exercise: Exercise, answer: dict[str, str]) -> str:
    """The reference's file with a wrong answer in it."""
    source = exercise.read_reference()
    lines = function_lines(source, exercise.cut)
    text = lines.of(source)
    assert text.count(answer["old"]) == 1, f"{exercise.id}: {answer['why']}: the reference has changed"
    return lines.replaced(source, text.replace(answer["old"], answer["new"]))


class Case(NamedTuple):
    """One version of an exercise's function, in its whole file."""

    exercise: Exercise
    kind: str  # "reference", "blank" or "wrong"
    why: str
    donor: str
    drawn: bool  # whether a picture of the failure is asked for


def cases(exercise: Exercise) -> Iterator[Case]:
    """The reference, the blank, and the wrong answers, the first of them with its picture."""
    reference = exercise.read_reference()
    yield Case(exercise, "reference", "", reference, False)
    yield Case(exercise, "blank", "", blanked(reference, [exercise]), False)
    for i, answer in enumerate(wrong_answers(exercise.stage)[exercise.id]):
        yield Case(
            exercise, "wrong", answer["why"], changed(exercise, answer), bool(exercise.picture) and i == 0
        )


def fault(case: Case, result: dict) -> str:
    """What is not as it should be about a check's result; "" if nothing is."""
    if result["passed"] != (case.kind == "reference"):
        return "passes" if result["passed"] else "fails"
    if result["passed"]:
        return ""
    if not result.get("test"):
        return "fails, but by no test"
    # The blank of 6.2 only breaks a connection: its client cannot know why.
    said = result["error"] + result.get("cause", "")
    if case.kind == "blank" and case.exercise.id != "6.2" and f"exercise {case.exercise.id}" not in said:
        return "fails, but not because of the hole"
    return "fails without its picture" if case.drawn and "picture" not in result else ""


@pytest.mark.slow
def test_checks_tell_right_from_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process for each case, as `sixstage exercise check` does it; two workers side by side, a thread each."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    tried = [case for exercise in ALL for case in cases(exercise)]
    jobs = [
        make_job(case.exercise, case.donor, tmp_path, tmp_path / f"{i}.png" if case.drawn else None)
        for i, case in enumerate(tried)
    ]
    results: list[dict] = [{}] * len(jobs)

    def work(first: int) -> None:
        results[first::2] = run_jobs(jobs[first::2], find_checkout())

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    faults = {
        f"{case.exercise.id} {case.kind} {case.why}": (found, result)
        for case, result in zip(tried, results, strict=True)
        if (found := fault(case, result))
    }
    assert faults == {}


@pytest.mark.parametrize("chapter", COURSE)
def test_each_exercise_has_two_wrong_answers(chapter: str) -> None:
    """And nothing is kept for an exercise that is no more."""
    kept = wrong_answers(chapter)
    assert kept.keys() == {exercise.id for exercise in listing(chapter)}
    assert all(len(answers) >= 2 for answers in kept.values())


def test_the_course_has_enough_exercises() -> None:
    """At least twenty, three or more in each stage, numbered from 1."""
    assert len(ALL) >= 20
    for stage in COURSE:
        ids = [exercise.id for exercise in listing(stage)]
        assert ids == [f"{find_number(stage)}.{i + 1}" for i in range(len(ids))]
        assert len(ids) >= 3


@pytest.mark.parametrize("exercise", ALL, ids=lambda exercise: exercise.id)
def test_cutting(exercise: Exercise) -> None:
    """The blank keeps signature and docstring, is Python, and lacks the answer; the reference fills it again."""
    reference = exercise.read_reference()
    blank = blanked(reference, [exercise])
    compile(blank, exercise.file, "exec")
    before = function_lines(reference, exercise.cut).of(reference)
    after = function_lines(blank, exercise.cut).of(blank)
    assert marker(exercise.id) in after
    assert len(after.splitlines()) <= len(before.splitlines()) + 1
    assert set(after.splitlines()) - set(before.splitlines()) == {
        line for line in after.splitlines() if f"TODO {exercise.id}" in line or marker(exercise.id) in line
    }
    assert transplanted(blank, reference, exercise.cut)[0] == reference


@pytest.mark.parametrize("exercise", ALL, ids=lambda exercise: exercise.id)
def test_texts(exercise: Exercise) -> None:
    """One to three hints and a task, and tests that are there."""
    assert 1 <= len(exercise.hints) <= 3
    assert exercise.task
    assert 5 <= exercise.minutes <= 60
    for test in exercise.tests:
        if test.startswith("tests/"):
            assert (find_checkout() / test.partition("::")[0]).is_file()
