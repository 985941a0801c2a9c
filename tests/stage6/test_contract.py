"""CONTRACT.md is true: each test that it names is there and says which row it is about."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROW = re.compile(r"\| (#?[A-Z]?\d+) \| [^|]+ \| ([^|]+) \|")
LINES = [
    line for line in (HERE / "CONTRACT.md").read_text(encoding="utf-8").splitlines() if ROW.fullmatch(line)
]
ROWS = dict(ROW.fullmatch(line).groups() for line in LINES)
NAMED = [(row, name) for row, cell in ROWS.items() for name in re.findall(r"`(test_[^`]+)`", cell)]
REPORTS = re.compile(r"[Ss]ection 7,? rows? (\d+(?:(?:, | and )\d+)*)")


def rows_of(text: str) -> set[str]:
    """The rows that a docstring names: "A1, A2", and "section 7, rows 3 and 4" as #3 and #4."""
    text = re.sub(r"KNOWN_FAULTS [B\d, ]+", "", text)  # ids of another list
    reports = (number for group in REPORTS.findall(text) for number in re.findall(r"\d+", group))
    return {f"#{number}" for number in reports} | set(re.findall(r"\b[ABTSPR]\d+\b", text))


def mentions(path: Path) -> tuple[set[str], dict[str, set[str]]]:
    """Rows that a file's docstring names, and those that each of its tests names."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    tests = [function for function in functions if function.name.startswith("test_")]
    of_test = {test.name: rows_of(ast.get_docstring(test) or "") for test in tests}
    return rows_of(ast.get_docstring(tree) or ""), of_test


@pytest.mark.parametrize(("row", "name"), NAMED, ids=[f"{row}-{name}" for row, name in NAMED])
def test_the_named_test_is_there_and_names_the_row(row, name):
    """The function exists in that file, and its docstring has the id."""
    file, function = name.split("::")
    of_file, of_test = mentions(HERE / file)
    assert row in of_test[function] | of_file


def test_every_row_has_a_test_or_a_reason():
    """Nothing is left open, and no row stands twice: 130 of section 6, 28 of section 7."""
    assert len(LINES) == len(ROWS) == 130 + 28
    assert sum(row.startswith("#") for row in ROWS) == 28
    for row, cell in ROWS.items():
        assert cell.startswith(("`test_", "not here: ")), row


def test_every_row_that_a_test_mentions_is_listed():
    """With that test; a mistyped id would look like a row that is covered."""
    for path in sorted(HERE.glob("test_*.py")):
        of_file, of_test = mentions(path)
        assert of_file <= ROWS.keys(), path.name
        for name, rows in of_test.items():
            assert all(f"`{path.name}::{name}`" in ROWS.get(row, "") for row in rows), f"{path.name}::{name}"
