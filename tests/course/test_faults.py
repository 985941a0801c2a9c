"""FAULTS.md is true: each test that it names is there and says which fault it is about."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROW = re.compile(r"\| (B\d+) \| [^|]+ \| ([^|]+) \|")
ROWS = dict(ROW.fullmatch(line).groups() for line in (TESTS / "FAULTS.md").read_text().splitlines()[6:])
NAMED = [(row, name) for row, cell in ROWS.items() for name in re.findall(r"`([^`]+)`", cell)]


def docstrings(path: Path) -> dict[str, str]:
    """Docstring of each function of a test file, methods too."""
    functions = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
    return {function.name: ast.get_docstring(function) or "" for function in functions}


@pytest.mark.parametrize(("row", "name"), NAMED, ids=[f"{row}-{name}" for row, name in NAMED])
def test_the_named_test_is_there_and_names_the_fault(row, name):
    """The function exists in that file, and its docstring has the id."""
    file, function = name.split("::")
    found = docstrings(TESTS / file)
    assert function in found, f"{file} has no {function}"
    assert re.search(rf"\b{row}\b", found[function]), f"the docstring of {function} does not mention {row}"


def test_every_row_has_a_test_or_a_reason():
    """Nothing is left open, and no row stands twice."""
    lines = [line for line in (TESTS / "FAULTS.md").read_text().splitlines() if line.startswith("| B")]
    assert len(lines) == len(ROWS) == 78
    assert list(ROWS) == sorted(ROWS, key=lambda row: int(row[1:]))
    for cell in ROWS.values():
        assert "`" in cell or cell.startswith(("not yet: ", "not applicable: ")), cell


def test_every_fault_that_a_test_mentions_is_listed():
    """A mistyped id would look like a fault that is covered."""
    for path in TESTS.rglob("test_*.py"):
        if path.parent.name in ("stage6", "clients"):  # their ids are rows of the API contract
            continue
        for name, text in docstrings(path).items():
            assert set(re.findall(r"\bB\d{2,3}\b", text)) <= ROWS.keys(), f"{path.name}::{name}"
