"""The report's forms: one page that needs nothing else, Markdown, JSON.  How it looks: test_report_page.py."""

import json
import re
from html.parser import HTMLParser

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from common.bench.report import (
    Picture,
    Report,
    Section,
    Table,
    human_bytes,
    print_report,
    save,
    to_html,
    to_json,
    to_markdown,
)
from common.errors import SixstageError


def a_report() -> Report:
    figure = Figure()
    figure.subplots().bar(["a"], [1.0])
    table = Table(("stage", "tok/s"), [["one & <two>", "1.5"], ["a|b", "[red]2"]], caption="a caption")
    pictures = [Picture("bars", figure, 'says "one"', "what it is")]
    return Report(
        "A title", "A lead.",
        [Section("First", ("Words <b>.",), table, pictures), Section("Folded", folded=[("Why?", "Line 1\nLine 2")])],
        "the footer", {"speed": 1.5},
    )  # fmt: skip


class Page(HTMLParser):
    """Collects tags with their attributes, and checks that they are closed in order."""

    VOID = ("meta", "link", "img", "br", "path", "use", "image", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        self.words.append(data)


def test_page_stands_alone() -> None:
    text = to_html([a_report()])
    page = Page(text)
    assert page.open == []
    assert not {"img", "iframe"} & {tag for tag, _ in page.tags}
    assert "default-src 'none'" in text, "the browser is told to fetch nothing"
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            outside = name in ("src", "href", "xlink:href") and not value.startswith(("#", "data:"))
            assert not outside, f"{tag} {name}={value} is fetched from elsewhere"
    assert not re.search(r"url\((?!#)", text), "styles fetch nothing"
    assert not re.search(r"fetch\(|XMLHttp|import\(|@import", text)
    assert any(attributes.get("name") == "viewport" for _, attributes in page.tags)


def test_page_says_everything_and_escapes_it() -> None:
    page = Page(to_html([a_report()]))
    words = " ".join(page.words)
    for text in ("A title", "A lead.", "Words <b>.", "one & <two>", "1.5", "a caption", "what it is", "Why?",
                 "Line 1\nLine 2", "the footer"):  # fmt: skip
        assert text in words
    [svg] = [attributes for tag, attributes in page.tags if tag == "svg" and "aria-hidden" not in attributes]
    assert svg["role"] == "img"
    assert svg["aria-label"] == 'says "one"'
    assert page.words.count('says "one"') == 1, "for those who see it badly, too"


def test_markdown() -> None:
    text = to_markdown(a_report(), "demo")
    assert "| stage | tok/s |\n| --- | ---: |\n| one & <two> | 1.5 |\n| a\\|b | [red]2 |" in text
    assert '![says "one"](demo-bars.svg)' in text
    assert "> Line 1\n> Line 2" in text


def test_json_is_what_json_says_it_is() -> None:
    figures = {
        "a": [1, 2.5, -3e-7, [4, [5]], "[\n 1]"],
        "b": [],
        "c": [{"é": [None, True]}],
        "d": {},
        5: "</script>",
    }
    text = to_json(figures)
    assert json.loads(text) == json.loads(json.dumps(figures))
    assert '"a": [1, 2.5, -3e-07, [4, [5]], ' in text


def test_terminal() -> None:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115  # closed with the test
    print_report(a_report(), console)
    shown = console.export_text()
    assert "A lead." in shown
    assert "[red]2" in shown, "cells are text, not markup"


def test_save(tmp_path) -> None:
    folder = tmp_path / "deep" / "reports"
    paths = save(a_report(), folder, "demo", tmp_path / "more" / "all.json")
    assert [path.name for path in paths] == ["demo.html", "demo.md", "demo.json"]
    assert sorted(path.name for path in folder.iterdir()) == [
        "demo-bars.svg", "demo.html", "demo.json", "demo.md"]  # fmt: skip
    assert json.loads((folder / "demo.json").read_text()) == {"speed": 1.5}
    assert (tmp_path / "more" / "all.json").read_text() == (folder / "demo.json").read_text()


def test_unwritable(tmp_path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SixstageError, match="cannot write"):
        save(a_report(), tmp_path / "file", "demo")


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (24 << 20, "24.0 MiB"), (3 << 29, "1.50 GiB")],
)
def test_human_bytes(count, expected) -> None:
    assert human_bytes(count) == expected
