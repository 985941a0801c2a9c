"""The workshops run from a clean kernel: with their gaps, filled in, and with wrong answers."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest

from common.course import notebook_build
from common.course.diff import stage_folder
from common.course.notebook_build import STORED, build, execute, learners, read_source, solved
from common.errors import SixstageError
from common.stages import IDEAS

LARGEST = 500_000  # bytes of a stored notebook
PATIENCE = 120  # seconds for a cell here, where other work may run beside it; building one allows 30
NEEDS_MODEL = [stage for stage in IDEAS if stage != "stage3_paged"]
MACHINE_PATH = re.compile(r"(?:/home/|/root/|/tmp/|/Users/|site-packages|[A-Z]:\\\\)")

WRONG = {
    "1.1": ("logits[-1]", "logits[0]"),
    "1.3": ("n * (n - 1)", "n * (n + 1)"),
    "1.4": ("end - 1", "end"),
    "2.1": ("torch.cat([self.values[layer], v])", "torch.cat([v, self.values[layer]])"),
    "2.2": ("2 * layers", "layers"),
    "2.3": ("useful_percent = ", "useful_percent = 60 + "),
    "2.4": ("max(batch) * places", "max(answers) * places"),
    "3.1": ("missing > len(free)", "missing > len(free) + 1"),
    "3.2": ("+ p % block_size", "+ p"),
    "3.3": ("v_cache[block, offset]", "v_cache[block, 0]"),
    "Puzzle 2": ("factor * x, mask=i < n", "factor * x"),
    "Puzzle 4": ("acc * shrink", "acc"),
    "Puzzle 5": ("v = tl.load(v_ptr + tile, mask=inside[:, None], other=0)", "v = tl.load(v_ptr + tile)"),
    "4.1": ("forwards = ", "forwards = 11 + "),
    "4.2": ("budget - behind", "budget"),
    "4.3": ("        budget -= num_new\n", ""),
    "4.4": ("budget - others", "budget"),
    "5.1": ("sha256(parent + ", "sha256("),
    "5.2": ("(len(prompt) - 1) // block_size", "len(prompt) // block_size"),
    "5.3": ("    owners[source] -= 1\n", ""),
    "5.4": ("(score + logprob,", "(logprob,"),
    "6.3": ("completion_tokens - 1", "completion_tokens"),
    "6.4": ("[1, 2, 3, 4, 5]", "[6, 7]"),
    "6.5": ('"role": "tool"', '"role": "user"'),
}
"""Beginning of a check's title -> what to replace in its solution, so that it looks right and is wrong."""


def code(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(cell, kind: str) -> list[str]:
    return [out.data[kind] for out in cell.outputs if kind in out.get("data", ())]


def verdicts(notebook) -> list[tuple[str, str]]:
    """(pass, fail or not yet; the rest of what a check says), in order."""
    plain = [text for cell in code(notebook) for text in outputs(cell, "text/plain")]
    found = [re.match(r"(PASS|FAIL|NOT YET)  (.*)", text, re.DOTALL) for text in plain]
    return [(match[1].lower(), match[2]) for match in found if match]


def with_wrong_answers(source) -> tuple[nbformat.NotebookNode, list[str]]:
    """The solved notebook where, after some checks, a wrong answer is checked too; and the expected verdicts."""
    notebook = solved(source)
    cells, expected, answer = [], [], None
    for cell in notebook.cells:
        cells.append(cell)
        if "solution" in cell.metadata.get("tags", ()):
            answer = cell
        title = re.search(r'@check\("(.*?)"\)', cell.source)
        if cell.cell_type != "code" or title is None:
            continue
        expected.append("pass")
        for beginning, (right, wrong) in WRONG.items():
            if title[1].startswith(beginning):
                assert answer.source.count(right) == 1, f"{beginning}: {right!r} is not in the solution"
                broken = copy.deepcopy(answer)
                broken.source = answer.source.replace(right, wrong)
                cells += copy.deepcopy([broken, cell, answer])
                expected.append("fail")
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"
    notebook.cells = cells
    return notebook, expected


@pytest.fixture(
    scope="module",
    params=[pytest.param(s, marks=[pytest.mark.model135] if s in NEEDS_MODEL else []) for s in IDEAS],
)
def ran(request):
    """A stage's notebook, run with gaps and filled in at the same time; and what the second one's checks should say."""
    source, folder = read_source(request.param), stage_folder(request.param)
    graded, expected = with_wrong_answers(source)
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setenv("OMP_NUM_THREADS", "1")  # each; two threads of both would wait for one another
        jobs = [pool.submit(execute, notebook, folder, PATIENCE) for notebook in (learners(source), graded)]
        gaps, filled = (job.result() for job in jobs)
    return gaps, filled, expected


@pytest.mark.slow
def test_notebook(ran):
    """No gap stops the notebook, every solution passes, wrong answers fail, and every exercise has a picture."""
    gaps, filled, expected = ran
    blanks = sum("blank" in cell.metadata.get("tags", ()) for cell in gaps.cells)
    assert 3 <= blanks <= 9
    assert [word for word, _ in verdicts(gaps)] == ["not yet"] * blanks
    found = verdicts(filled)
    assert [word for word, _ in found] == expected, [text for word, text in found if word == "fail"]
    for cell in code(filled):
        if '@check("' in cell.source and outputs(cell, "text/plain")[-1].startswith("PASS"):
            assert outputs(cell, "image/png"), f"no picture: {cell.source[:40]}"
    for cell in code(gaps) + code(filled):
        for out in cell.outputs:
            assert out.output_type != "error"
            if out.get("name") == "stderr":
                assert out.text.startswith("compiling "), out.text  # kernels, once on each machine


@pytest.mark.parametrize("workshop", IDEAS)
def test_stored_notebook(workshop):
    """It is what its source makes, it has been run, it is small, and it tells nothing of the machine."""
    path = stage_folder(workshop) / STORED
    text = path.read_text(encoding="utf-8")
    stored = nbformat.reads(text, as_version=4)
    nbformat.validate(stored)
    wanted = learners(read_source(workshop))
    assert [(cell.cell_type, cell.source) for cell in stored.cells] == [
        (cell.cell_type, cell.source) for cell in wanted.cells
    ], f"sixstage notebooks {workshop[5]}"
    assert [cell.execution_count for cell in code(stored)] == list(range(1, len(code(stored)) + 1))
    assert len(text) < LARGEST
    said = "\n".join(str(cell.outputs) for cell in code(stored))
    assert not MACHINE_PATH.search(said)
    assert str(Path.cwd()) not in said
    assert os.path.expanduser("~") + os.sep not in said
    pictures = [out for cell in code(stored) for out in cell.outputs if "image/png" in out.get("data", ())]
    assert pictures
    assert all(out.metadata["image/png"]["alt"] for out in pictures)


@pytest.mark.parametrize("workshop", IDEAS)
def test_gaps_have_hints_and_wrong_answers(workshop):
    """Hints stand where they are needed; at least one wrong answer per notebook is kept here."""
    source = read_source(workshop)
    kinds = [(cell.cell_type, cell.metadata.get("tags", []), cell.source) for cell in source.cells]
    for (_, _, before), (_, tags, gap) in pairwise(kinds):
        if "blank" in tags and "raise NotImplementedError" in gap:
            assert "<summary>Hint</summary>" in before, gap
    titles = [title for _, _, text in kinds for title in re.findall(r'@check\("(.*?)"\)', text)]
    assert any(title.startswith(beginning) for title in titles for beginning in WRONG)


@pytest.mark.parametrize("workshop", IDEAS)
def test_code_is_clean(workshop):
    """No name unused, none undefined; and no line that a cell could not show whole."""
    cells = [cell.source for cell in code(solved(read_source(workshop)))]
    rules = ["check", "--isolated", "--select", "F,E501", "--line-length", "100", "-"]
    found = subprocess.run(
        [sys.executable, "-m", "ruff", *rules],
        input="\n\n".join(cells),
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cell", "seconds", "said"),
    [("1 / 0", 30, "a cell raised ZeroDivisionError: division by zero"),
     ("while True: pass", 1, "a cell took longer than 1 s")],
)  # fmt: skip
def test_a_cell_that_fails_is_named_in_one_line(cell, seconds, said, monkeypatch, tmp_path):
    """And no half notebook is left behind."""
    source = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    monkeypatch.setattr(notebook_build, "read_source", lambda stage: source)
    monkeypatch.setattr(notebook_build, "CELL_SECONDS", seconds)
    with pytest.raises(SixstageError, match=f"stage1_naive/workshop.md: {said}"):
        build("stage1_naive", tmp_path / "out.ipynb")
    assert not list(tmp_path.iterdir())
