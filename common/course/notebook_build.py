"""From a notebook's source, `stageN/workshop.md`, to the notebooks that people open.

The source is jupytext's Markdown: text is text, and each fenced Python block is a cell.  Two tags say what the
reader has to do:

    ```python tags=["blank"]       the reader's cell, with a gap in it
    ```python tags=["solution"]    the same cell filled in

The learner's notebook keeps the blank and folds the solution away below it.  The solved one has the solution in
the blank's place; tests run both.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.course.diff import stage_folder
from common.errors import InvalidValue, ModelError, SixstageError

if TYPE_CHECKING:
    from nbformat import NotebookNode

SOURCE, STORED = "workshop.md", "workshop.ipynb"
CELL_SECONDS = 30  # the longest that a cell may take
FOLDED = "<details>\n<summary>Solution</summary>\n\n```python\n{code}\n```\n\n</details>"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def read_source(stage: str) -> NotebookNode:
    """A stage's notebook as it is written, each blank with its solution right behind it.

    Raises:
        InvalidValue: a blank without a solution, or the other way round.
        ModelError: the packages that notebooks need are not installed.
    """
    path = stage_folder(stage) / SOURCE
    notebook = _package("jupytext").read(path, fmt="md")
    for cell, following in zip([None, *notebook.cells], [*notebook.cells, None], strict=True):
        if _is_tagged(cell, "blank") != _is_tagged(following, "solution"):
            raise InvalidValue(SOURCE, f"{stage}: {following or cell}", "a solution right behind each blank")
    return notebook


def learners(source: NotebookNode) -> NotebookNode:
    """The notebook with its gaps; each solution is folded away below its blank."""
    fold = _package("nbformat").v4.new_markdown_cell
    return _notebook(
        fold(FOLDED.format(code=cell.source)) if _is_tagged(cell, "solution") else cell
        for cell in source.cells
    )


def solved(source: NotebookNode) -> NotebookNode:
    """The notebook with its gaps filled."""
    return _notebook(cell for cell in source.cells if not _is_tagged(cell, "blank"))


def execute(notebook: NotebookNode, folder: Path, seconds: float = CELL_SECONDS) -> NotebookNode:
    """Run all cells in a fresh kernel that starts in `folder`; the outputs are in what is returned.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
        nbclient.exceptions.CellTimeoutError: a cell took longer than `seconds`.
    """
    client = _package("nbclient").NotebookClient(
        notebook,
        timeout=seconds,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        extra_arguments=["--log-level=ERROR"],  # or each kernel warns that it listens on this machine
    )
    client.execute()
    notebook.metadata.language_info = METADATA["language_info"]  # the kernel adds its version
    return notebook


def build(stage: str, path: Path | None = None, solve: bool = False) -> Path:
    """Make and run a stage's notebook, and write it with its outputs.

    Args:
        stage: name of a stage of the course.
        path: where to; None is the stage's own folder.
        solve: with the gaps filled.

    Returns:
        The file.

    Raises:
        SixstageError: a cell raised or took too long; nothing is written then.
    """
    source = read_source(stage)
    folder = stage_folder(stage)
    errors = _package("nbclient").exceptions
    try:
        notebook = execute(solved(source) if solve else learners(source), folder, CELL_SECONDS)
    except errors.CellTimeoutError as error:
        raise SixstageError(f"{stage}/{SOURCE}: a cell took longer than {CELL_SECONDS} s") from error
    except errors.CellExecutionError as error:
        raise SixstageError(f"{stage}/{SOURCE}: a cell raised {error.ename}: {error.evalue}") from error
    path = folder / STORED if path is None else path
    _package("nbformat").write(notebook, path)
    return path


def _is_tagged(cell: NotebookNode | None, tag: str) -> bool:
    return cell is not None and tag in cell.metadata.get("tags", ())


def _notebook(cells: Iterable[NotebookNode]) -> NotebookNode:
    """A notebook that is the same however often it is built: plain metadata, cells named by their place."""
    nbformat = _package("nbformat")
    copies = [nbformat.from_dict({**cell, "id": f"cell-{number}"}) for number, cell in enumerate(cells)]
    return nbformat.v4.new_notebook(cells=copies, metadata=METADATA)


def _package(name: str) -> Any:
    """A package that only notebooks need."""
    try:
        return import_module(name)
    except ModuleNotFoundError as missing:
        raise ModelError(
            f"notebooks need the package {missing.name!r}: pip install 'sixstage[course]'"
        ) from missing
