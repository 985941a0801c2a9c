"""The exercises of the course: functions cut out of the reference code, as each stage's course.toml lists them.

    [[exercises]]
    id = "3.2"                         stage and number
    title = "Grow a block table"
    task = "..."                       what to write, in a sentence or two
    minutes = 15                       how long it usually takes
    file = "block_tables.py"           in the stage's folder, or in common ("common/sequence.py")
    cut = "BlockTables.allocate"       the function whose body is left to the learner
    part = "for.body"                  only this part of it; see `common.course.exercises_cut`
    tests = ["tests/stage3/..."]       the project's own tests that check it
    hints = ["...", "..."]             one to three, each telling more
    picture = "pool"                   drawn from the state at a failure; see `exercises_pictures`
    interpreted = true                 Triton kernels run in its interpreter, on the CPU

Nothing is copied by hand, so an exercise cannot drift from the code that the chapter explains.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from common.course.diff import stage_folder
from common.errors import InvalidValue
from common.stages import IDEAS, find_chapter, find_number

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

COURSE = tuple(IDEAS)


@dataclass(frozen=True)
class Exercise:
    """One exercise; the fields are those of course.toml.

    Attributes:
        stage: name of the stage whose chapter it belongs to.
    """

    id: str
    stage: str
    title: str
    task: str
    minutes: int
    file: str
    cut: str
    tests: tuple[str, ...]
    hints: tuple[str, ...]
    part: str = ""
    picture: str = ""
    interpreted: bool = False

    @property
    def package(self) -> str:
        """The package that its file is in: the stage, or common."""
        return "common" if self.file.startswith("common/") else self.stage

    @property
    def inner_path(self) -> str:
        """Path of its file inside that package."""
        return self.file.removeprefix("common/")

    @property
    def module(self) -> str:
        """The module that is taken from the learner while it is checked: "stage3_paged.block_tables"."""
        return f"{self.package}.{self.inner_path.removesuffix('.py').replace('/', '.')}"

    @property
    def workspace_name(self) -> str:
        """Its file in a workspace, which has no folders: "kernels/triton_device.py" is triton_device.py."""
        return Path(self.file).name

    def read_reference(self) -> str:
        """Source of the file that it is cut from."""
        return (stage_folder(self.package) / self.inner_path).read_text(encoding="utf-8")


@cache
def listing(stage: str | int) -> tuple[Exercise, ...]:
    """The exercises of a stage, in the order of the chapter.

    Raises:
        InvalidValue: there is no such stage, or an entry of its course.toml is not as it should be.
    """
    name = find_chapter(stage)
    text = (stage_folder(name) / "course.toml").read_text(encoding="utf-8")
    return tuple(_read(name, entry) for entry in tomllib.loads(text).get("exercises", ()))


def find_exercise(exercise_id: str) -> Exercise:
    """The exercise of this id ("3.2").

    Raises:
        InvalidValue: there is none.
    """
    stage = exercise_id.partition(".")[0]
    known = listing(stage) if any(find_number(name) == stage for name in COURSE) else ()
    for exercise in known:
        if exercise.id == exercise_id:
            return exercise
    ids = [exercise.id for exercise in known]
    allowed = f"{ids[0]} to {ids[-1]}" if ids else "an id such as 3.2; sixstage exercise list shows them"
    raise InvalidValue("exercise", exercise_id, allowed)


def choose(words: Iterable[str]) -> list[Exercise]:
    """Exercises named on a command line, where "3" is all of stage 3, but "3 3.2" only 3.2.

    Raises:
        InvalidValue: a word names neither a stage nor an exercise.
    """
    words = list(words)
    ids = [word for word in words if re.fullmatch(r"\d+\.\d+", word)]
    stages = [find_chapter(word) for word in words if word not in ids]
    named = [find_exercise(word) for word in ids]
    whole = [stage for stage in stages if all(exercise.stage != stage for exercise in named)]
    return [*(exercise for stage in whole for exercise in listing(stage)), *named]


def _read(stage: str, entry: dict[str, object]) -> Exercise:
    lists = {name: tuple(value) for name, value in entry.items() if isinstance(value, list)}
    try:
        exercise = Exercise(stage=stage, **{**entry, **lists})  # type: ignore[arg-type]
    except TypeError as error:
        raise InvalidValue(
            f"{stage}/course.toml", entry.get("id"), f"the fields of an exercise: {error}"
        ) from error
    if exercise.id.partition(".")[0] != find_number(stage) or not exercise.tests or not exercise.hints:
        raise InvalidValue(f"{stage}/course.toml", exercise.id, "an id of this stage, with tests and hints")
    return exercise
