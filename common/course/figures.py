"""The numbers in the chapters, held to the JSON files that the benchmarks write.

A number that was measured stands in front of a comment that says where it is:

    holds up to 156<!-- capacity.memory.stage3_paged.running.peak --> requests

and a table is made from a template in the comment above it:

    <!-- table
    | system | requests in, peak |
    |---|---:|
    {% for name, f in capacity.memory.items() %}
    | {{ name }} | {{ f.running.peak|number }} |
    {% endfor %}
    -->
    | system | requests in, peak |
    ...
    <!-- end -->

Readers of the page see neither comment.  Expressions and templates are Jinja's; `capacity` is the file
`capacity.json` in `docs/` or in a stage's `results/`.  How many decimals a number has is for the text to say.
What looks measured and is not from such a file (the paper's numbers, a setting) is listed in a comment of its
own, `<!-- given: 20.4 38.2 (the paper's Fig. 2) -->`, anywhere in the text.

`python -m common.course.figures` says which numbers no longer match; with `--write` it puts the right ones in.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, TemplateError

from common.errors import SixstageError
from common.files import write_file

ROOT = Path(__file__).resolve().parents[2]
NUMBER = r"(?<![\w.,])[-+]?\d[\d,]*(?:\.\d+)?"
INLINE = re.compile(rf"(?P<shown>{NUMBER}|`[^`\n]*`)<!-- (?P<where>[^\n]*?) -->")
TABLE = re.compile(r"<!-- table\n(?P<template>.*?)-->\n(?P<shown>.*?)<!-- end -->", re.DOTALL)
GIVEN = re.compile(r"<!-- given:(?P<numbers>.*?)-->", re.DOTALL)
NOT_PROSE = re.compile(
    r"^ *```.*?^ *```$|<!--.*?-->|`[^`\n]*`|\]\([^)]*\)|\*\*\d\.\d (?=\w)", re.DOTALL | re.MULTILINE
)
"""Code, comments, addresses, and the numbers of exercises ("**3.1 Hand out blocks**")."""

UNIT = r"(?:\*\*)?(?:%| (?:%|percent|ms|s|seconds|times|tok/s|tokens per second|[KMG]i?B(?:/s)?))(?!\w)"
MEASURED = re.compile(
    r"(?<![\w.,/])(?:\d+\.\d+|\d{1,3}(?:,\d{3})+)(?![\w/]|\.\d)|(?<![\w.,])\d+(?=" + UNIT + ")"
)


@dataclass(frozen=True)
class Fault:
    """One place where a text and the figures disagree."""

    line: int  # from 1
    shown: str
    right: str  # or why there is no right one
    where: str  # the expression, or "table"

    def __str__(self) -> str:
        return f"line {self.line}: {self.shown!r} should be {self.right!r} ({self.where})"


class Figures:
    """All figures of a repository, by the names of their files.

    Args:
        data: name without suffix -> what the JSON holds.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data
        self.jinja = Environment(
            undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
        )
        self.jinja.filters.update(number=number, percent=percent, mib=mib)

    def faults(self, text: str) -> list[Fault]:
        """Marked numbers and tables that are not what the figures say; none if all are right."""
        found = []
        for pattern, right in ((TABLE, self._table), (INLINE, self._inline)):
            for match in pattern.finditer(text):
                line, where = 1 + text.count("\n", 0, match.start()), match.groupdict().get("where", "table")
                try:
                    expected = right(match)
                except (TemplateError, TypeError, ValueError) as error:
                    found.append(Fault(line, match["shown"], f"cannot be computed: {error}", where))
                    continue
                if match["shown"] != expected:
                    found.append(Fault(line, match["shown"], expected, where))
        return found

    def refreshed(self, text: str) -> str:
        """The text with the figures' own numbers in every marked place.

        Raises:
            SixstageError: an expression cannot be computed.
        """

        def put(match: re.Match[str], right: str) -> str:
            start, end = (place - match.start() for place in match.span("shown"))
            return match[0][:start] + right + match[0][end:]

        try:
            text = TABLE.sub(lambda match: put(match, self._table(match)), text)
            return INLINE.sub(lambda match: put(match, self._inline(match)), text)
        except (TemplateError, TypeError, ValueError) as error:
            raise SixstageError(f"a figure cannot be computed: {error}") from error

    def _inline(self, match: re.Match[str]) -> str:
        value = self.jinja.compile_expression(match["where"], undefined_to_none=False)(**self.data)
        if isinstance(value, StrictUndefined):
            str(value)  # raises, and says what there is not
        shown = match["shown"]
        if shown.startswith("`"):
            return f"`{value}`"
        return number(float(str(value)), len(shown.partition(".")[2]))

    def _table(self, match: re.Match[str]) -> str:
        return self.jinja.from_string(match["template"]).render(**self.data)


def number(value: float, decimals: int = 0) -> str:
    """1234.56 -> "1,234.6" with one decimal."""
    return f"{value:,.{decimals}f}"


def percent(share: float, decimals: int = 1) -> str:
    """0.978 -> "97.8"."""
    return number(100 * share, decimals)


def mib(count: float, decimals: int = 1) -> str:
    """Bytes -> MiB."""
    return number(count / (1 << 20), decimals)


def unmarked(text: str) -> list[str]:
    """Numbers that look measured (a decimal point, thousands, a unit) and have neither mark nor licence."""
    licensed = _licensed(text)
    return [found for found in _measured(text) if found not in licensed]


def idle_licences(text: str) -> list[str]:
    """Numbers that are listed as given, and stand nowhere in the text."""
    used = _measured(text)
    return [found for found in _licensed(text) if found not in used]


def _measured(text: str) -> list[str]:
    """What looks measured in the text, marked numbers and made tables left out."""
    return MEASURED.findall(NOT_PROSE.sub(" ", INLINE.sub(" ", TABLE.sub(" ", text))))


def _licensed(text: str) -> list[str]:
    """The numbers that are listed as given; what stands in brackets there says why."""
    lists = " ".join(match["numbers"] for match in GIVEN.finditer(text))
    return re.findall(NUMBER, re.sub(r"\([^)]*\)", " ", lists))


def chapters(root: Path = ROOT) -> list[Path]:
    """The syllabus, and the chapters in order."""
    return [root / "README.md", *sorted(root.glob("stage*_*/README.md"))]


def read_figures(root: Path = ROOT) -> Figures:
    """Everything that the benchmarks have left in `docs/` and in the stages' `results/`.

    Raises:
        SixstageError: two files have one name.
    """
    found: dict[str, Any] = {}
    for path in [*root.glob("docs/*.json"), *sorted(root.glob("stage*_*/results/*.json"))]:
        if path.stem in found:
            raise SixstageError(f"two files are called {path.name}: a chapter could mean either")
        found[path.stem] = json.loads(path.read_text(encoding="utf-8"))
    return Figures(found)


def main() -> int:
    """Check every chapter, or mend it (`--write`); 1 if a number is wrong."""
    figures, wrong = read_figures(), 0
    for chapter in chapters():
        text = chapter.read_text(encoding="utf-8")
        if "--write" in sys.argv[1:]:
            write_file(chapter, figures.refreshed(text))
            continue
        for fault in figures.faults(text):
            wrong = 1
            print(f"{chapter.relative_to(ROOT)}, {fault}")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
