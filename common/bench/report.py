"""One report, four forms: a self-contained HTML page (`report_page`), Markdown with its pictures, JSON, terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from common.bench.report_events import Events
from common.bench.report_multiples import Group
from common.bench.report_page import to_html
from common.course.pictures import to_svg
from common.files import write_file


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column names the row, the others are figures, set to the right."""

    columns: Seq[str]
    rows: Seq[Seq[str]]
    caption: str = ""


@dataclass(frozen=True)
class Picture:
    """A figure with its file name (without suffix), what it says in words, and a caption."""

    name: str
    figure: Figure
    alt: str
    caption: str = ""
    on_page: bool = True  # False where the page has something better: bars as text, or a run to step through


@dataclass(frozen=True)
class Section:
    """A heading with any of: paragraphs, a table, pictures, runs, and (title, text) pairs that fold open.

    `runs` (name -> `report_events.events`) are stepped through side by side; Markdown does without them.
    """

    heading: str
    paragraphs: Seq[str] = ()
    table: Table | None = None
    pictures: Seq[Picture] = ()
    runs: Mapping[str, Events] = field(default_factory=dict)
    folded: Seq[tuple[str, str]] = ()


@dataclass(frozen=True)
class Report:
    """A whole report.

    Attributes:
        title: of the page.
        lead: the result in a sentence or two.
        sections: in order.
        footer: where and with what it was measured.
        figures: all numbers, for JSON.
        overview: small multiples, one group per workload, for the page.
    """

    title: str
    lead: str
    sections: Seq[Section]
    footer: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    overview: Seq[Group] = ()


def publish(
    report: Report, console: Console, folder: str | Path, name: str, json_file: str | Path | None = None
) -> None:
    """Print the report, write its files (see `save`), and say where they are."""
    print_report(report, console)
    for path in save(report, folder, name, json_file):
        console.print(f"wrote {path}")


def save(report: Report, folder: str | Path, name: str, json_file: str | Path | None = None) -> list[Path]:
    """Write `name.html`, `name.md` with its pictures, and `name.json`; and the JSON to `json_file` too.

    Each file appears whole or not at all.

    Returns:
        The files that a reader opens: HTML, Markdown, JSON.

    Raises:
        SixstageError: a file cannot be written.
    """
    folder = Path(folder)
    data = to_json(report.figures)
    page, text, numbers = (folder / f"{name}.{suffix}" for suffix in ("html", "md", "json"))
    write_file(page, to_html([report]))
    write_file(text, to_markdown(report, name))
    write_file(numbers, data)
    for section in report.sections:
        for picture in section.pictures:
            write_file(
                folder / f"{name}-{picture.name}.svg", to_svg(picture.figure, picture.alt, themed=False)
            )
    if json_file is not None:
        write_file(Path(json_file), data)
    return [page, text, numbers]


def to_json(figures: Mapping[str, Any]) -> str:
    """Indented, but a list without objects in it on one line."""
    return _json(figures, "\n") + "\n"


def to_markdown(report: Report, name: str) -> str:
    """The same in Markdown; pictures are files beside it, `name-<picture>.svg`."""
    lines = [f"# {report.title}", "", report.lead, ""]
    for section in report.sections:
        lines += [f"## {section.heading}", ""]
        for paragraph in section.paragraphs:
            lines += [paragraph, ""]
        if section.table is not None:
            lines += [*_markdown_table(section.table), ""]
        for picture in section.pictures:
            lines += [f"![{picture.alt}]({name}-{picture.name}.svg)", "", picture.caption, ""]
        for title, text in section.folded:
            quoted = "\n".join(f"> {line}".rstrip() for line in text.splitlines())
            lines += [f"**{title}**", "", quoted, ""]
    return "\n".join([*lines, report.footer]).rstrip() + "\n"


def print_report(report: Report, console: Console) -> None:
    """The lead and every table, for a terminal."""
    console.print()
    console.print(f"[bold]{escape(report.title)}[/bold]")
    console.print(escape(report.lead))
    for section in report.sections:
        if section.table is not None:
            console.print()
            console.print(rich_table(section.table, section.heading))


def rich_table(table: Table, title: str = "") -> RichTable:
    """A table for the terminal."""
    drawn = RichTable(title=title, title_justify="left", title_style="bold", header_style="bold")
    for number, column in enumerate(table.columns):
        drawn.add_column(escape(column), justify="right" if number else "left", no_wrap=not number)
    for row in table.rows:
        drawn.add_row(*(escape(cell) for cell in row))
    return drawn


def human_bytes(count: float) -> str:
    """Bytes as a person reads them: 1.5 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def _markdown_table(table: Table) -> list[str]:
    rows = [list(table.columns), ["---", *("---:" for _ in table.columns[1:])]]
    rows += [[cell.replace("|", "\\|") for cell in row] for row in table.rows]
    return ["| " + " | ".join(row) + " |" for row in rows]


def _json(value: Any, margin: str) -> str:
    """Of a part; `margin` is a line's end with the blanks that begin the next."""
    deeper = f"{margin} "
    if isinstance(value, Mapping) and value:
        parts = (
            f"{json.dumps(str(key), ensure_ascii=False)}: {_json(v, deeper)}" for key, v in value.items()
        )
        return f"{{{deeper}{f',{deeper}'.join(parts)}{margin}}}"
    if isinstance(value, (list, tuple)) and any(isinstance(part, Mapping) for part in value):
        return f"[{deeper}{f',{deeper}'.join(_json(part, deeper) for part in value)}{margin}]"
    return json.dumps(value, ensure_ascii=False)
