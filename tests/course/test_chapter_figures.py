"""The numbers in syllabus and chapters are those of the JSON files that the benchmarks wrote."""

from __future__ import annotations

import json
import re

import pytest

from common.course.figures import (
    TABLE,
    Figures,
    chapters,
    idle_licences,
    main,
    read_figures,
    unmarked,
)
from common.errors import SixstageError

FIGURES = read_figures()
BY_NAME = {
    path.parent.name if path.parent.name.startswith("stage") else "syllabus": path for path in chapters()
}
PARTS = (
    "## The problem",
    "## The idea",
    "## The diff",
    "## Exercises",
    "## The result",
    "## Where it loses",
    "## What vLLM does",
)
CHAPTERS = [name for name in BY_NAME if name != "syllabus"]


def text(name: str) -> str:
    return BY_NAME[name].read_text(encoding="utf-8")


@pytest.mark.parametrize("name", BY_NAME)
def test_every_marked_number_is_the_measured_one(name):
    """After new measurements `python -m common.course.figures --write` puts them in."""
    assert [str(fault) for fault in FIGURES.faults(text(name))] == []


@pytest.mark.parametrize("name", BY_NAME)
def test_nothing_looks_measured_and_is_not(name):
    """A number with a decimal point, thousands or a unit is marked, or listed as given with the reason."""
    if name == "stage6_api" and "serve" not in FIGURES.data:
        pytest.skip("results/serve.json is not there yet: `sixstage bench serve` writes it")
    assert unmarked(text(name)) == []
    assert idle_licences(text(name)) == []


@pytest.mark.parametrize("name", CHAPTERS)
def test_chapters_share_one_template(name):
    """The same parts in the same order; and each leads to the next."""
    heads = re.findall(r"^## .*$", text(name), re.MULTILINE)
    places = [next(i for i, head in enumerate(heads) if head.startswith(part)) for part in PARTS]
    assert places == sorted(places)
    assert "Time:" in text(name).split("##")[0]


@pytest.mark.parametrize("name", CHAPTERS)
def test_chapters_are_read_in_one_sitting(name):
    """Words that a reader sees, tables and code left out."""
    seen = re.sub(r"<!--.*?-->|^```.*?^```$|^\|.*?$", "", text(name), flags=re.DOTALL | re.MULTILINE)
    assert 1300 <= len(seen.split()) <= 2500


@pytest.mark.parametrize("name", BY_NAME)
def test_links_and_pictures_are_there(name):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", re.sub(r"<!--.*?-->", "", text(name), flags=re.DOTALL))
    for link in links:
        if "://" not in link:
            assert (BY_NAME[name].parent / link).exists(), link


class TestFigures:
    """The check itself notices what it is for."""

    figures = Figures(
        {"run": {"speed": 1234.56, "of, two": {"n": 3}, "commit": "abcdef", "rows": {"a": {"x": 0.5}}}}
    )

    def test_right_and_wrong_numbers(self):
        right = "gives **1,234.6<!-- run.speed --> tok/s**, `abc`<!-- run.commit[:3] --> of 3<!-- run['of, two'].n -->"
        assert self.figures.faults(right) == []
        [fault] = self.figures.faults("one\ntwo 1,234.5<!-- run.speed --> three")
        assert (fault.line, fault.shown, fault.right) == (2, "1,234.5", "1,234.6")
        assert len(self.figures.faults("`abd`<!-- run.commit[:3] -->")) == 1

    def test_the_text_says_how_many_decimals(self):
        assert self.figures.refreshed("9<!-- run.speed --> 9.00<!-- run.speed / 2 -->") == (
            "1,235<!-- run.speed --> 617.28<!-- run.speed / 2 -->"
        )

    @pytest.mark.parametrize("where", ["run.sped", "runs.speed", "run.speed +", "run.rows", "run.commit"])
    def test_what_is_not_there_is_a_fault(self, where):
        [fault] = self.figures.faults(f"5<!-- {where} -->")
        assert "cannot be computed" in fault.right
        with pytest.raises(SixstageError):
            self.figures.refreshed(f"5<!-- {where} -->")

    def test_tables_are_made(self):
        made = (
            "<!-- table\n| {% for k, v in run.rows.items() %}{{ k }} {{ v.x|percent }} |{% endfor %}\n\n-->\n"
        )
        old = f"{made}| b 1.0 |\n<!-- end -->"
        assert len(self.figures.faults(old)) == 1
        new = self.figures.refreshed(old)
        assert "| a 50.0 |" in TABLE.search(new)["shown"]
        assert self.figures.faults(new) == []

    def test_unmarked_numbers(self):
        prose = "1.5 times, 3<!-- run.speed --> ms, 20 %, 7 requests, 1,024 tokens, `0.5`, v0.33, 1960s, **3.1 Pool**"
        assert unmarked(prose) == ["1.5", "20", "1,024"]
        assert unmarked(f"{prose} <!-- given: 1.5 20 (the 9 reasons) 1,024 -->") == []
        assert idle_licences(f"{prose} <!-- given: 20 33 (the 9 reasons) -->") == ["33"]
        assert unmarked("```\n1.5 s\n```\n[a 2.5](x3.5.svg)") == ["2.5"]

    def test_two_files_of_one_name_are_refused(self, tmp_path):
        for folder in ("docs", "stage1_x/results"):
            (tmp_path / folder).mkdir(parents=True)
            (tmp_path / folder / "demo.json").write_text(json.dumps({}))
        with pytest.raises(SixstageError, match=r"demo\.json"):
            read_figures(tmp_path)

    def test_command_says_what_is_wrong(self, monkeypatch, capsys):
        monkeypatch.setattr("sys.argv", ["figures"])
        monkeypatch.setattr("common.course.figures.read_figures", lambda: Figures({}))
        assert main() == 1
        assert "stage3_paged/README.md, line" in capsys.readouterr().out
