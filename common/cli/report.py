"""`sixstage report`: one page of results that have been written before."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from common.cli.options import check_target

Files = Annotated[
    list[Path],
    typer.Argument(metavar="FILES", help="JSON files that demo or bench wrote; shown in this order."),
]
Page = Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where the page goes.")]


def report(files: Files, page: Page = Path("report.html")) -> None:
    """Make one page of the results of 'sixstage demo' and 'sixstage bench', from whatever machine.

    The page needs no network and no other file: overview, every experiment, and the recorded runs to step
    through.

    \b
    Examples:
      sixstage report reports/*.json -o reports/index.html

    Look at: the same requests in every stage, all at the same second.
    """
    check_target("--out", page)
    from common.bench.report_files import make_page  # noqa: PLC0415

    make_page(files, page)
    typer.echo(f"wrote {page}")
