"""`sixstage exercise ...`: write a part of an engine yourself, and have it checked by the engine's own tests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from common.cli.options import check_folder, spread
from common.errors import InvalidValue

if TYPE_CHECKING:
    from common.course.exercises import Exercise
    from common.course.exercises_check import Outcome
    from common.course.exercises_workspace import Workspace

Root = Annotated[
    Path,
    typer.Option("--workspace", "--to", metavar="DIR", help="Where your files are: in DIR/stage3 and so on."),
]
Which = Annotated[list[str], typer.Argument(help="A stage (3) or exercises (3.2).", show_default=False)]
One = Annotated[str, typer.Argument(help="The exercise's number, such as 3.2.", show_default=False)]
HOME = Path("workspace")

WORDS = {
    "": "",
    "not begun": "not begun",
    "begun": "not checked",
    "failed": "not yet right",
    "passed": "solved",
}
STYLES = {"passed": "green", "failed": "red"}


def list_exercises(workspace: Root = HOME) -> None:
    """List the exercises of all stages, and how far you are."""
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    from common.course.exercises import COURSE, listing  # noqa: PLC0415

    table = Table(box=None, header_style="bold")
    for heading in ("", "exercise", "minutes", "file", "state"):
        table.add_column(heading, justify="right" if heading == "minutes" else "left")
    for stage in COURSE:
        folder = _workspace(workspace, stage)
        for exercise in listing(stage):
            state = folder.state(exercise)
            word = Text(WORDS[state], style=STYLES.get(state, ""))
            table.add_row(exercise.id, exercise.title, str(exercise.minutes), exercise.workspace_name, word)
    _console().print(table)


def start(
    stage: Annotated[str, typer.Argument(help="A stage's number or name.", show_default=False)],
    workspace: Root = HOME,
    force: Annotated[
        bool, typer.Option("--force", help="Begin again; your files become .bak files.")
    ] = False,
) -> None:
    """Write a stage's files with the exercises cut out, for you to fill in."""
    check_folder("--workspace", workspace)
    from common.stages import find_chapter, find_number  # noqa: PLC0415

    name = find_chapter(stage)
    for path in _workspace(workspace, name).begin(force):
        typer.echo(f"wrote {path}")
    typer.echo(f"look for TODO in the files, then: sixstage exercise check {find_number(name)}")


def check(
    which: Which,
    workspace: Root = HOME,
    timeout: Annotated[float, typer.Option(help="Seconds that one exercise's tests may take.")] = 30.0,
) -> None:
    """Check exercises by the project's own tests, with your functions in the engine's place.

    Only the function at hand is taken from your file, so exercises can be done in any order.  Ends with 1 if
    something is not right yet.

    \b
    Examples:
      sixstage exercise check 3        all of stage 3
      sixstage exercise check 3.2      one

    Look at: the counter-example, and the picture where there is one.
    """
    if timeout <= 0:
        raise InvalidValue("timeout", timeout, "a number above 0")
    from common.course.exercises import choose  # noqa: PLC0415
    from common.course.exercises_check import check as run_check  # noqa: PLC0415

    by_stage: dict[str, list[Exercise]] = {}
    for exercise in choose(which):
        by_stage.setdefault(exercise.stage, []).append(exercise)
    wrong = 0
    for stage, exercises in by_stage.items():
        folder = _workspace(workspace, stage)
        for outcome in run_check(exercises, folder.donors(), folder.folder, timeout):
            folder.note(outcome.exercise, state=outcome.state)
            _tell(outcome, folder.path(outcome.exercise))
            wrong += outcome.state != "passed"
    if wrong:
        raise typer.Exit(1)


def hint(
    exercise: One,
    workspace: Root = HOME,
    everything: Annotated[bool, typer.Option("--all", help="Show all hints at once.")] = False,
) -> None:
    """Show a hint, each time one more."""
    found, folder = _find(exercise, workspace)
    shown = int(folder.noted(found).get("hints", 0))
    count = len(found.hints) if everything else min(shown + 1, len(found.hints))
    for number, text in enumerate(found.hints[:count], 1):
        typer.echo(f"{number}. {text}")
    left = len(found.hints) - count
    typer.echo(f"({left} more)" if left else f"(no more hints: sixstage exercise solve {found.id} shows how)")
    if folder.folder.is_dir():
        folder.note(found, hints=max(count, shown))


def solve(
    exercise: One,
    workspace: Root = HOME,
    write: Annotated[bool, typer.Option("--write", help="Also put it into your file.")] = False,
) -> None:
    """Show how the engine does it."""
    from rich.syntax import Syntax  # noqa: PLC0415

    from common.course.exercises_cut import function_lines  # noqa: PLC0415

    found, folder = _find(exercise, workspace)
    reference = found.read_reference()
    lines = function_lines(reference, found.cut)
    code = lines.of(reference).rstrip()
    syntax = Syntax(
        code, "python", theme="ansi_dark", line_numbers=True, start_line=lines.first, word_wrap=True
    )
    typer.echo(f"{found.package}/{found.inner_path}: {found.cut}")
    _console().print(syntax)
    if write:
        folder.write_solution(found)
        typer.echo(f"wrote {folder.path(found)} (as it was: {folder.path(found).name}.bak)")


def reset(which: Which, workspace: Root = HOME) -> None:
    """Put the holes back, of a stage or of single exercises; files as they were are kept as .bak files."""
    from common.course.exercises import choose  # noqa: PLC0415

    for exercise in choose(which):
        folder = _workspace(workspace, exercise.stage)
        folder.reset(exercise)
        typer.echo(f"{exercise.id} is a hole again in {folder.path(exercise)}")


def _exercise(context: typer.Context) -> None:
    """Write parts of the engines yourself, and have them checked by the engines' own tests.

    Exercises are functions that were cut out of the stages.  What you write is tested in the engine, with
    everything around it as it was, and the package itself is never changed.

    \b
    Examples:
      sixstage exercise start 3        files with holes, in workspace/stage3
      sixstage exercise check 3        which of them are filled rightly
      sixstage exercise hint 3.2       a hint, each time one more
      sixstage exercise solve 3.2      how the engine does it

    Look at: the counter-example of a failed check, and its picture.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


exercise = typer.Typer(name="exercise", rich_markup_mode="rich")
exercise.callback(invoke_without_command=True)(spread(_exercise))
exercise.command("list")(spread(list_exercises))
for command in (start, check, hint, solve, reset):
    exercise.command()(spread(command))


def _find(exercise_id: str, root: Path) -> tuple[Exercise, Workspace]:
    from common.course.exercises import find_exercise  # noqa: PLC0415

    found = find_exercise(exercise_id)
    return found, _workspace(root, found.stage)


def _workspace(root: Path, stage: str) -> Workspace:
    from common.course.exercises_workspace import Workspace  # noqa: PLC0415

    return Workspace(root, stage)


def _console() -> Any:
    from rich.console import Console  # noqa: PLC0415

    return Console(highlight=False)


def _tell(outcome: Outcome, path: Path) -> None:
    from rich.text import Text  # noqa: PLC0415

    from common.course.exercises_check import in_words  # noqa: PLC0415

    console, found = _console(), outcome.exercise
    console.print(
        Text.assemble(
            (f"{found.id}  {found.title}: ", "bold"), (WORDS[outcome.state], STYLES.get(outcome.state, ""))
        )
    )
    for line in in_words(outcome, path):
        console.print(Text(f"     {line}"), soft_wrap=True)
