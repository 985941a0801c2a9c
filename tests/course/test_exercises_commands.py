"""`sixstage exercise ...` as a learner uses it: the workspace is theirs, the package is never touched."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import common
from common.cli import main
from common.course.diff import stage_folder
from common.course.exercises import choose, find_exercise
from common.course.exercises_check import find_checkout
from common.errors import InvalidValue, SixstageError

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def exercise(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """`exercise("check", "3")` runs the command in an empty folder: its exit code, output and errors."""
    monkeypatch.delenv("SIXSTAGE_DEBUG", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["exercise", *words])
        return code, *capsys.readouterr()

    return run


def edit(path: Path, old: str, new: str) -> None:
    """Change the learner's file."""
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), encoding="utf-8")


HOLE_32 = 'raise NotImplementedError("exercise 3.2")'
ROUNDED_DOWN = """missing = num_tokens // self.block_size - len(seq.block_table)
        blocks = self.pool.allocate(max(0, missing))
        if blocks:
            seq.block_table += blocks
            self.holders[id(seq)] = seq
        return blocks"""


@pytest.mark.slow
def test_a_learner_s_hour(exercise: Command, tmp_path: Path) -> None:
    """Right, wrong, endless and untouched exercises in one check; each is told what it needs to know."""
    before = (stage_folder("stage3_paged") / "block_tables.py").read_bytes()
    folder = tmp_path / "workspace" / "stage3"
    assert exercise("start", "3")[0] == 0
    assert exercise("solve", "3.1", "--write")[0] == 0
    edit(folder / "block_tables.py", HOLE_32, ROUNDED_DOWN)
    edit(folder / "engine.py", 'raise NotImplementedError("exercise 3.6")', "while True:\n            pass")
    edit(folder / "block_tables.py", 'raise NotImplementedError("exercise 3.4")', "return math.inf > 0")
    code, out, _ = exercise("check", "3.1", "3.2", "3.3", "3.4", "3.6", "--timeout", "6")
    assert code == 1
    parts = dict(zip(("3.1", "3.2", "3.3", "3.4", "3.6"), out.split("\n3."), strict=True))
    assert parts["3.1"].endswith("Hand out blocks: solved")
    assert "test_a_block_is_added_exactly_at_a_multiple_of_the_block_size[1]" in parts["3.2"]
    assert "assert len(seq.block_table) == (prompt_tokens + 3) // 4" in parts["3.2"]
    assert "assert 0 == " in parts["3.2"]
    assert "3.2.png" in parts["3.2"]
    assert (folder / "3.2.png").read_bytes().startswith(b"\x89PNG")
    assert "not begun" in parts["3.3"]
    assert "name 'math' is not defined" in parts["3.4"]
    assert "imports and helpers belong inside it" in parts["3.4"]
    lines = (folder / "block_tables.py").read_text(encoding="utf-8").splitlines()
    assert f"line {lines.index('        return math.inf > 0') + 1}: return math.inf > 0" in parts["3.4"]
    assert "a loop that never ends?" in parts["3.6"]
    assert "engine.py, line" in parts["3.6"]
    rows = [line.split() for line in exercise("list")[1].splitlines()]
    states = {row[0]: " ".join(row[-2:]) for row in rows if row[0].startswith("3.")}
    assert states["3.1"].endswith("solved")
    assert (states["3.2"], states["3.3"], states["3.6"]) == ("yet right", "not begun", "yet right")
    assert (stage_folder("stage3_paged") / "block_tables.py").read_bytes() == before


def test_work_is_never_overwritten_unasked(exercise: Command, tmp_path: Path) -> None:
    """A second start is refused; forced, it keeps what was there; and so does reset."""
    file = tmp_path / "mine" / "stage5" / "beam.py"
    assert exercise("start", "5", "--to", "mine")[0] == 0
    blank = file.read_text(encoding="utf-8")
    assert blank.count("NotImplementedError") == 2
    edit(file, 'raise NotImplementedError("exercise 5.7")', "return True")
    mine = file.read_text(encoding="utf-8")
    code, _, err = exercise("start", "5", "--to", "mine")
    assert code == 2
    assert "--force" in err
    assert file.read_text(encoding="utf-8") == mine
    assert exercise("reset", "5.7", "--to", "mine")[0] == 0
    assert file.read_text(encoding="utf-8") == blank
    assert file.with_name("beam.py.bak").read_text(encoding="utf-8") == mine
    file.write_text(mine, encoding="utf-8")
    assert exercise("start", "5", "--to", "mine", "--force")[0] == 0
    assert file.read_text(encoding="utf-8") == blank
    assert file.with_name("beam.py.bak").read_text(encoding="utf-8") == mine


def test_hints_come_one_by_one(exercise: Command) -> None:
    """Each time one more, or all at once; what was shown is remembered where there is a workspace."""
    hints = find_exercise("3.2").hints
    exercise("start", "3")
    for count in (1, 2, 3, 3):
        shown = exercise("hint", "3.2")[1]
        assert [text in shown for text in hints] == [i < count for i in range(3)]
    assert all(text in exercise("hint", "5.4", "--all")[1] for text in find_exercise("5.4").hints)


def test_a_solution_is_shown_and_can_be_written(exercise: Command, tmp_path: Path) -> None:
    """The reference's own lines, under their own numbers."""
    assert "return [self.free_blocks.pop() for _ in range(count)]" in exercise("solve", "3.1")[1]
    code, _, err = exercise("solve", "3.1", "--write")
    assert (code, "sixstage exercise start 3" in err) == (2, True)
    exercise("start", "3")
    exercise("solve", "3.1", "--write")
    reference = (stage_folder("stage3_paged") / "block_pool.py").read_text(encoding="utf-8")
    assert (tmp_path / "workspace/stage3/block_pool.py").read_text(encoding="utf-8") == reference


def test_files_that_cannot_be_read(exercise: Command, tmp_path: Path) -> None:
    """A syntax error is named with its line, a function that was deleted by its name; nothing has to run."""
    file = tmp_path / "workspace" / "stage3" / "block_pool.py"
    exercise("start", "3")
    edit(file, 'raise NotImplementedError("exercise 3.1")', "return [")
    code, out, _ = exercise("check", "3.1")
    assert code == 1
    assert f"line {out and 1 + file.read_text().splitlines().index('        return [')}: " in out
    file.write_text("class BlockPool:\n    pass\n", encoding="utf-8")
    code, out, _ = exercise("check", "3.1")
    assert (code, "no function BlockPool.allocate any more" in out) == (1, True)
    assert exercise("reset", "3.1")[0] == 2
    shutil.rmtree(file.parent)
    code, _, err = exercise("check", "3.1")
    assert (code, "sixstage exercise start 3" in err) == (2, True)


@pytest.mark.parametrize(
    "words", [("start", "9"), ("check", "3.99"), ("hint", "x"), ("solve", "3"), ("reset", "7.1")]
)
def test_what_is_not_there_is_named(exercise: Command, words: tuple[str, str]) -> None:
    """In one line, with what there is."""
    code, _, err = exercise(*words)
    assert code == 2
    assert repr(words[1]) in err


def test_names_on_a_command_line() -> None:
    """A stage stands for all of it, but a stage and one of its exercises for that one."""
    assert [e.id for e in choose(["4"])] == ["4.1", "4.2", "4.3"]
    assert [e.id for e in choose(["4", "4.2"])] == ["4.2"]
    assert [e.id for e in choose(["stage4_continuous", "3.1"])] == ["4.1", "4.2", "4.3", "3.1"]
    with pytest.raises(InvalidValue, match="stage: got '0'"):
        choose(["0"])


def test_an_installation_without_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What checks the exercises is in a checkout only."""
    monkeypatch.setattr(common, "__file__", str(tmp_path / "site-packages" / "common" / "__init__.py"))
    with pytest.raises(SixstageError, match="git clone"):
        find_checkout()
