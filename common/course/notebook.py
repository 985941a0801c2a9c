"""What the workshop notebooks show: the verdict of a check, pictures, tables.

A gap in a notebook is `raise NotImplementedError` (code) or `...` (a prediction).  A check runs what stands in
the gap and says one of three things, and never stops the notebook:

    pass       all its assertions hold
    fail       one does not, or the code broke; the message says which
    not yet    the gap is still a gap
"""

from __future__ import annotations

import html
import traceback
from base64 import b64encode
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import EllipsisType
from typing import TypeVar

from IPython.display import display
from matplotlib.figure import Figure

from common.course.pictures import to_png

DPI = 84  # a stored notebook stays small, and text in pictures is as large as text around them
T = TypeVar("T")


@dataclass(frozen=True)
class Verdict:
    """How one check ended; `text` is what it says."""

    word: str
    text: str
    color: str
    mark: str

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        """For Jupyter: plain text, and a line with a coloured edge that suits light and dark pages."""
        style = f"border-left: 6px solid {self.color}; padding: 0.3em 0.8em; margin: 0.3em 0"
        text = html.escape(self.text).replace("\n", "<br>")
        return {
            "text/plain": f"{self.word.upper()}  {self.text}",
            "text/html": f'<div style="{style}"><b>{self.mark} {self.word}</b> &nbsp; {text}</div>',
        }


def check(title: str) -> Callable[[Callable[[], object]], None]:
    """Run the decorated function now, and show whether it passes.

    Args:
        title: of the exercise, as its heading has it.
    """

    def run(exercise: Callable[[], object]) -> None:
        try:
            exercise()
        except Exception as error:
            display(_judge(title, error))
        else:
            display(Verdict("pass", title, "#3b9c5e", "✓"))

    return run


def predicted(value: T | EllipsisType) -> T:
    """What the reader predicts; a prediction that is still `...` is "not yet"."""
    if isinstance(value, EllipsisType):
        raise NotImplementedError
    return value


def show(figure: Figure, alt: str) -> None:
    """Show a picture; `alt` says what is in it, for whoever cannot see it."""
    bundle = {"text/plain": f"[{alt}]", "image/png": b64encode(to_png(figure, DPI)).decode()}
    display(bundle, raw=True, metadata={"image/png": {"alt": alt}})


def table(headings: Seq[str], rows: Seq[Seq[object]]) -> None:
    """Show a table; numbers go to the right."""
    numbers = [all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(headings))]
    rule = ["---:" if number else "---" for number in numbers]
    cells = [[f"{v:,}" if isinstance(v, int) else str(v) for v in row] for row in rows]
    escaped = [[cell.replace("|", "\\|").replace("<", "&lt;") for cell in row] for row in cells]
    lines = [f"| {' | '.join(row)} |" for row in [list(headings), rule, *escaped]]
    plain = [" | ".join(row) for row in [list(headings), *cells]]
    display({"text/plain": "\n".join(plain), "text/markdown": "\n".join(lines)}, raw=True)


def _judge(title: str, error: Exception) -> Verdict:
    """A gap is no mistake; everything else is shown with the reader's own line where there is one."""
    causes = [error, *_causes(error)]
    if any(isinstance(cause, NotImplementedError) for cause in causes):
        return Verdict("not yet", f"{title}: fill the gap above, then run this cell again.", "#8b949e", "○")
    first = causes[-1]
    text = str(first).strip() or _line(first)
    if not isinstance(first, AssertionError):
        text = f"{type(first).__name__}: {text}\nin: {_line(first)}"
    return Verdict("fail", f"{title}: {text}", "#c8553d", "✗")


def _causes(error: BaseException) -> list[BaseException]:
    """What an error was raised from, step by step (Triton's interpreter wraps what it meets)."""
    chained: list[BaseException] = []
    while error.__cause__ is not None:
        error = error.__cause__
        chained.append(error)
    return chained


def _line(error: BaseException) -> str:
    """The line that broke: the last one that was written in a notebook, or else the last one."""
    frames = traceback.extract_tb(error.__traceback__)
    written = [frame for frame in frames if "ipykernel" in frame.filename]
    return next(iter([*reversed(written), *reversed(frames)])).line or "" if frames else ""
