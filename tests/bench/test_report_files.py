"""`sixstage report`: the page from files, the same as was written with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.bench.report import human_bytes
from common.bench.report_files import make_page, read_report
from common.bench.report_page import to_html
from common.cli import main
from common.errors import InvalidValue

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(ROOT.glob("stage*/results/*.json"))


def test_every_file_of_the_chapters_has_a_page() -> None:
    """All of them in one page, small enough to be sent by mail."""
    assert len(FILES) >= 3
    reports = [read_report(path) for path in FILES]
    text = to_html(reports)
    for path, report in zip(FILES, reports, strict=True):
        assert report.sections
        assert report.figures == json.loads(path.read_text(encoding="utf-8"))
        assert text.count(f">{report.title}</h2>") == 1
    assert len(text) < 1.5 * 2**20, human_bytes(len(text))


@pytest.mark.parametrize(
    "text",
    [
        None,
        "{",
        "[1, 2]",
        "{}",
        '{"stages": 3}',
        '{"stages": {}}',
        '{"chats": [], "environment": {}}',
        "\xff",
    ],
)
def test_what_is_no_result_is_refused_in_a_line(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidValue, match="file: got '/") as error:
        make_page([path], tmp_path / "page.html")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "page.html").exists()


def test_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="files"):
        make_page([], tmp_path / "page.html")


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["report", str(FILES[0]), "-o", str(page)]) == 0
    assert capsys.readouterr().out == f"wrote {page}\n"
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert main(["report", str(FILES[0]), "-o", str(tmp_path)]) == 2, "a folder is no page"
    assert main(["report"]) == 2
