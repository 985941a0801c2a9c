"""The `sixstage` command: its commands, and how it fails (one line, no traceback)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer

from common.cli.chat import chat
from common.cli.course import diff, stages
from common.cli.exercise import exercise
from common.cli.generate import generate
from common.cli.measure import bench, demo
from common.cli.notebooks import notebooks
from common.cli.options import spread
from common.cli.profile import profile
from common.cli.report import report
from common.cli.roofline import roofline
from common.cli.serve import serve
from common.errors import SixstageError

USAGE_ERROR, UNEXPECTED, INTERRUPTED = 2, 1, 130


def _sixstage(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Show the version and end.")] = False,
) -> None:
    """How vLLM serves many users from one machine: working engines, one idea each.

    Start with [bold]sixstage demo[/]: the same chat prompts through every stage, answers compared, speed and
    memory side by side.  Then read what made the difference: [bold]sixstage diff 1 2[/].

    An error is one line and a non-zero exit code; SIXSTAGE_DEBUG=1 shows where it came from.
    """
    if show_version:
        typer.echo(f"sixstage {version('sixstage')}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


app = typer.Typer(add_completion=False, rich_markup_mode="rich")
app.callback(invoke_without_command=True)(spread(_sixstage))
for command in (demo, generate, chat, serve, roofline, diff, stages, report, notebooks):
    app.command()(spread(command))
bench.command()(spread(profile))
app.add_typer(bench)
app.add_typer(exercise)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0 went well, 2 the user can mend it (a wrong option or value), 1 we did not foresee it, 130 Ctrl-C.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows "?"
    try:
        code = typer.main.get_command(app).main(
            args=None if argv is None else list(argv), prog_name="sixstage", standalone_mode=False
        )
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNEXPECTED
    except Exception as error:
        return _fail(error)


def _fail(error: Exception) -> int:
    """Say in one line what went wrong."""
    if os.environ.get("SIXSTAGE_DEBUG"):
        raise error
    message, code = f"unexpected {type(error).__name__}: {error} (SIXSTAGE_DEBUG=1 shows where)", UNEXPECTED
    if isinstance(error, SixstageError):
        message, code = str(error), USAGE_ERROR
    elif hasattr(error, "format_message"):  # wrong use of an option; typer's own class for it is private
        message, code = error.format_message(), USAGE_ERROR
    print(f"sixstage: error: {' '.join(message.split())}", file=sys.stderr)
    return code
