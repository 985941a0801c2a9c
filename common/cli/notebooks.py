"""`sixstage notebooks`: from the sources of the workshops to notebooks with outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from common.cli.options import check_folder

Stages = Annotated[
    list[str] | None, typer.Argument(help="A stage's name or number; may be several.", show_default="all six")
]
Folder = Annotated[
    Path | None,
    typer.Option("--out", metavar="FOLDER", help="Write stageN.ipynb there, instead of into the stages."),
]
Solved = Annotated[bool, typer.Option("--solved", help="With the gaps filled; needs --out.")]


def notebooks(stages: Stages = None, out: Folder = None, solved: Solved = False) -> None:
    """Build the workshop notebooks from their sources, and run them.

    Every stage has a `workshop.md`. It becomes `workshop.ipynb`: with gaps for the learner, run from top to
    bottom in a clean kernel, outputs included. To work through them, use `make notebooks`.

    \b
    Examples:
      sixstage notebooks 3                       after a change to stage3_paged/workshop.md
      sixstage notebooks --solved --out solved   a teacher's copy, all gaps filled

    Look at: how long it takes. A cell that needs more than 30 seconds ends the build.
    """
    from common.course.notebook_build import build  # noqa: PLC0415
    from common.errors import InvalidValue  # noqa: PLC0415
    from common.stages import IDEAS, find_chapter  # noqa: PLC0415

    names = [find_chapter(stage) for stage in stages or IDEAS]
    if solved and out is None:
        raise InvalidValue("--solved", True, "only with --out: the stored notebooks are the learner's")
    if out is not None:
        check_folder("--out", out)
        out.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = build(name, None if out is None else out / f"{name}.ipynb", solved)
        typer.echo(f"wrote {path}")
