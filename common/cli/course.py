"""`sixstage stages` and `sixstage diff`: what there is to read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from common.cli.options import check_target
from common.files import write_file
from common.stages import STAGES

HtmlFile = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write it as one self-contained page instead.")
]
Everything = Annotated[bool, typer.Option("--all", help="Show the text of new and rewritten files too.")]


def stages() -> None:
    """List the stages and the one idea of each.

    The numbers and names are what --stage takes everywhere, and what `sixstage diff` compares.
    """
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=None, header_style="bold")
    for heading in ("", "stage", "its one idea"):
        table.add_column(heading)
    for name, stage in STAGES.items():
        table.add_row(str(stage.number), name, stage.idea)
    Console().print(table)


def diff(
    before: Annotated[str, typer.Argument(help="A stage's name or number.", show_default=False)],
    after: Annotated[str, typer.Argument(help="The stage to compare with it.", show_default=False)],
    html: HtmlFile = None,
    everything: Everything = False,
) -> None:
    """Show what one stage changes in another: the chapter's lesson as a diff.

    Files that both stages have are compared line by line.  Untouched lines are identical to the byte, so
    whatever is coloured is the idea and nothing else.  The table below the diff tells which functions
    changed, which files are new, and what is imported unchanged from the stage where it was born.

    \b
    Examples:
      sixstage diff 1 2                    what a KV cache changes
      sixstage diff 1 2 --html diff.html   the same as a page

    Look at: _schedule. It says which tokens the next forward computes.
    """
    check_target("--html", html)
    from rich.console import Console  # noqa: PLC0415

    from common.course.diff import render, stage_diff, to_html  # noqa: PLC0415

    found = stage_diff(before, after)
    if html is None:
        Console().print(render(found, everything))
    else:
        write_file(html, to_html(found))
        typer.echo(f"wrote {html}")
