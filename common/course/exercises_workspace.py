"""A learner's folder: the files of a stage with the exercises cut out, and how far each exercise is.

workspace/stage3/README.md          what to do
workspace/stage3/block_pool.py      the reference with holes; only what is cut is theirs, the rest is to read
workspace/stage3/.progress.json     hints that were shown, and how the last check went
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from pathlib import Path
from textwrap import fill
from typing import Any

from common.course.exercises import Exercise, listing
from common.course.exercises_cut import (
    NoSuchFunction,
    blanked,
    is_blank,
    transplanted,
)
from common.errors import SixstageError
from common.files import write_file
from common.stages import find_number

BACKUP = ".bak"


class Workspace:
    """One stage's folder in a workspace.

    Args:
        root: the workspace.
        stage: name of the stage.
    """

    def __init__(self, root: Path, stage: str) -> None:
        self.stage = stage
        self.folder = root / f"stage{find_number(stage)}"
        self.exercises = listing(stage)

    def path(self, exercise: Exercise) -> Path:
        """The learner's file for an exercise."""
        return self.folder / exercise.workspace_name

    def begin(self, force: bool = False) -> list[Path]:
        """Write the files.

        Raises:
            SixstageError: some of them are there already, and this is not to be forced.
        """
        files = list(dict.fromkeys(exercise.file for exercise in self.exercises))
        there = [path for path in map(self._target, files) if path.exists()]
        if there and not force:
            raise SixstageError(
                f"{there[0]} is there already, and may hold your work: go on with it, or give --force "
                f"(what is there becomes {there[0].name}{BACKUP})"
            )
        for path in there:
            path.replace(path.with_name(path.name + BACKUP))
        for file in files:
            holes = [exercise for exercise in self.exercises if exercise.file == file]
            write_file(self._target(file), blanked(holes[0].read_reference(), holes))
        write_file(self.folder / "README.md", readme(self.stage, self.exercises))
        return [*map(self._target, files), self.folder / "README.md"]

    def donors(self) -> dict[str, Path]:
        """`Exercise.file` -> the learner's file.

        Raises:
            SixstageError: there is no workspace here yet.
        """
        for exercise in self.exercises:
            if not self.path(exercise).is_file():
                number = find_number(self.stage)
                raise SixstageError(
                    f"there is no {self.path(exercise)}: sixstage exercise start {number} makes it"
                )
        return {exercise.file: self.path(exercise) for exercise in self.exercises}

    def reset(self, exercise: Exercise) -> None:
        """Put the hole back; the file as it was becomes a .bak file."""
        self._put(exercise, blanked(exercise.read_reference(), [exercise]))
        self.note(exercise, state="not begun")

    def write_solution(self, exercise: Exercise) -> None:
        """Put the reference's function there; the file as it was becomes a .bak file."""
        self._put(exercise, exercise.read_reference())

    def note(self, exercise: Exercise, **facts: Any) -> None:
        """Remember something about an exercise."""
        everything = self._progress()
        everything.setdefault(exercise.id, {}).update(facts)
        write_file(self.folder / ".progress.json", json.dumps(everything, indent=1) + "\n")

    def noted(self, exercise: Exercise) -> dict[str, Any]:
        """What is remembered of an exercise: `hints` shown, `state` of the last check."""
        found: dict[str, Any] = self._progress().get(exercise.id, {})
        return found

    def state(self, exercise: Exercise) -> str:
        """How far it is, in a word: "", "not begun", "begun", "failed" or "passed"."""
        if not self.path(exercise).is_file():
            return ""
        text = self.path(exercise).read_text(encoding="utf-8")
        try:
            if is_blank(text, exercise):
                return "not begun"
        except (SyntaxError, NoSuchFunction):
            return "failed"
        checked = self.noted(exercise).get("state", "not begun")
        return "begun" if checked == "not begun" else str(checked)

    def _put(self, exercise: Exercise, donor: str) -> None:
        self.donors()
        path = self.path(exercise)
        text = path.read_text(encoding="utf-8")
        try:
            changed, _, _ = transplanted(text, donor, exercise.cut)
        except (SyntaxError, NoSuchFunction) as error:
            raise SixstageError(
                f"cannot find {exercise.cut} in {path} ({error}): mend the file, or begin the stage again with "
                f"sixstage exercise start {find_number(self.stage)} --force"
            ) from error
        write_file(path.with_name(path.name + BACKUP), text)
        write_file(path, changed)

    def _target(self, file: str) -> Path:
        return self.folder / Path(file).name

    def _progress(self) -> dict[str, Any]:
        path = self.folder / ".progress.json"
        if not path.exists():
            return {}
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise SixstageError(f"cannot read {path}: {error}; delete it to begin a new one") from error
        return found


def readme(stage: str, exercises: Seq[Exercise]) -> str:
    """What a learner finds beside the files."""
    number = find_number(stage)
    parts = [
        f"# Exercises of stage {number}\n\n"
        "Each exercise is a function, or a part of one, that was cut out of the engine. Look for `TODO` in the\n"
        "files, write what is missing, and check it:\n\n"
        f"    sixstage exercise check {number}          all of them\n"
        f"    sixstage exercise check {exercises[0].id}        one\n"
        f"    sixstage exercise hint {exercises[0].id}         a hint, each time one more\n"
        f"    sixstage exercise solve {exercises[0].id}        how the engine does it\n"
        f"    sixstage exercise reset {exercises[0].id}        the hole again\n\n"
        "Only the function of an exercise is taken from your file, everything around it from the engine. So they\n"
        "can be done in any order, and nothing else in these files matters: write helpers and imports inside the\n"
        "function. The package itself is never changed.\n\n"
        "A check quotes the test that failed. `B02` and the like in its sentence are faults that engines of this\n"
        "kind had in public; `tests/FAULTS.md` lists them.\n"
    ]
    for exercise in exercises:
        parts.append(
            f"\n## {exercise.id} {exercise.title} (about {exercise.minutes} minutes)\n\n"
            f"`{exercise.workspace_name}`: `{exercise.cut}`\n\n{fill(exercise.task, 105)}\n"
        )
    return "".join(parts)
