"""One report, four forms: a self-contained HTML page, Markdown with its pictures, JSON, terminal tables."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

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


@dataclass(frozen=True)
class Section:
    """A heading with any of: paragraphs, a table, pictures, and (title, text) pairs that fold open."""

    heading: str
    paragraphs: Seq[str] = ()
    table: Table | None = None
    pictures: Seq[Picture] = ()
    folded: Seq[tuple[str, str]] = ()


@dataclass(frozen=True)
class Report:
    """A whole report.

    Attributes:
        title: of the page.
        lead: the result in a sentence or two.
        sections: in order.
        footer: where and with what it was measured.
    """

    title: str
    lead: str
    sections: Seq[Section]
    footer: str = ""
    figures: dict[str, Any] = field(default_factory=dict)  # all numbers, for JSON


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
    data = json.dumps(report.figures, indent=1, ensure_ascii=False) + "\n"
    page, text, numbers = (folder / f"{name}.{suffix}" for suffix in ("html", "md", "json"))
    write_file(page, to_html(report))
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


def to_html(report: Report) -> str:
    """One page with everything in it: no script, no network, dark and light."""
    source = files("common.bench").joinpath("report.html").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(source).render(report=report, svg=to_svg)


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
