"""What the workshops are made with: verdicts, pictures, and the way from source to notebook."""

from __future__ import annotations

import nbformat
import pytest
import torch
from matplotlib.colors import to_rgba

from common.course import notebook, notebook_build
from common.course.notebook import check, predicted
from common.course.notebook_pictures import RIGHT, arrivals, bars, compare, curves, parted
from common.errors import InvalidValue
from common.stages import find_chapter

SOURCE = """# A title

```python tags=["blank"]
answer = ...
```

```python tags=["solution"]
answer = 42
```

```python
print(answer)
```
"""


@pytest.fixture
def shown(monkeypatch):
    """What a cell shows, as bundles of MIME types."""
    found = []

    def display(thing, raw=False, metadata=None):
        found.append(thing if raw else thing._repr_mimebundle_())

    monkeypatch.setattr(notebook, "display", display)
    return found


def verdict(shown, exercise) -> str:
    shown.clear()
    check("T")(exercise)
    [bundle] = shown
    return bundle["text/plain"]


def raising(error: Exception):
    def exercise():
        raise error

    return exercise


class TestVerdicts:
    def test_pass(self, shown):
        assert verdict(shown, lambda: None) == "PASS  T"

    def test_a_failed_assertion_says_its_message(self, shown):
        assert verdict(shown, raising(AssertionError("two <b>and</b> two"))) == "FAIL  T: two <b>and</b> two"
        assert "two &lt;b&gt;and&lt;/b&gt; two" in shown[0]["text/html"]

    def test_an_assertion_without_a_message_is_quoted(self, shown):
        assert verdict(shown, raising(AssertionError())) == "FAIL  T: raise error"

    def test_code_that_breaks_is_quoted(self, shown):
        text = verdict(shown, lambda: {}["key"])
        assert text.startswith("FAIL  T: KeyError: 'key'\nin: ")
        assert '{}["key"]' in text

    def test_a_gap_is_no_mistake(self, shown):
        assert verdict(shown, raising(NotImplementedError())).startswith("NOT YET  T")
        assert verdict(shown, lambda: predicted(...)).startswith("NOT YET  T")
        assert verdict(shown, lambda: predicted(0)) == "PASS  T"

    def test_a_gap_in_a_kernel_is_found_behind_the_interpreters_error(self, shown):
        def exercise():
            try:
                raise NotImplementedError
            except NotImplementedError as error:
                raise RuntimeError("interpreter") from error

        assert verdict(shown, exercise).startswith("NOT YET")

    def test_the_readers_interrupt_is_not_swallowed(self, shown):
        with pytest.raises(KeyboardInterrupt):
            verdict(shown, raising(KeyboardInterrupt()))


def test_table_escapes_what_markdown_would_read(shown):
    notebook.table(["id", "text"], [(1234, "<|im_end|>")])
    assert shown[0]["text/markdown"].splitlines() == [
        "| id | text |",
        "| ---: | --- |",
        "| 1,234 | &lt;\\|im_end\\|> |",
    ]


def test_show_says_what_is_in_the_picture(shown):
    notebook.show(bars({"a": 1.0}, "x"), "one bar")
    assert shown[0]["text/plain"] == "[one bar]"
    assert shown[0]["image/png"]


def test_compare_tells_right_wrong_and_missing():
    figure = compare(torch.tensor([1.0, 2.0, float("nan")]), torch.tensor([1.0, 3.0, 3.0]))
    fills = [patch for patch in figure.axes[0].patches if patch.get_linewidth() == 0]
    assert [patch.get_facecolor() == to_rgba(RIGHT, 0.35) for patch in fills] == [True, False, False]
    assert [text.get_text() for text in figure.axes[0].texts] == ["1", "2", "?"]


def test_small_pictures_show_their_numbers():
    [left, rest] = parted({"a": 10}, {"a": 4}, "x", "done", "spared").axes[0].patches
    assert (left.get_width(), rest.get_x(), rest.get_width()) == (4, 4, 6)
    lines = curves([1, 2], {"a": [3.0, 4.0], "b": [5.0, 6.0]}, "x", "y").axes[0].lines
    assert [list(line.get_ydata()) for line in lines] == [[3.0, 4.0], [5.0, 6.0]]
    marks = arrivals({"a": [0.1, 0.2], "b": [0.3]}).axes[0].lines
    assert [list(line.get_xdata()) for line in marks] == [[0.1, 0.2], [0.3]]


class TestBuild:
    @pytest.fixture
    def source(self, tmp_path, monkeypatch):
        def read(text: str):
            (tmp_path / notebook_build.SOURCE).write_text(text, encoding="utf-8")
            monkeypatch.setattr(notebook_build, "stage_folder", lambda stage: tmp_path)
            return notebook_build.read_source("stage1_naive")

        return read

    def test_learners_see_the_gap_and_may_unfold_the_solution(self, source):
        cells = notebook_build.learners(source(SOURCE)).cells
        assert [cell.cell_type for cell in cells] == ["markdown", "code", "markdown", "code"]
        assert cells[1].source == "answer = ..."
        assert cells[2].source.startswith("<details>")
        assert "answer = 42" in cells[2].source

    def test_solved(self, source):
        cells = notebook_build.solved(source(SOURCE)).cells
        assert [cell.source for cell in cells] == ["# A title", "answer = 42", "print(answer)"]

    def test_the_same_source_makes_the_same_notebook(self, source):
        assert notebook_build.learners(source(SOURCE)) == notebook_build.learners(source(SOURCE))

    @pytest.mark.parametrize("tag", ["blank", "solution"])
    def test_one_without_the_other_is_refused(self, source, tag):
        with pytest.raises(InvalidValue, match=r"workshop\.md"):
            source(SOURCE.replace(f' tags=["{tag}"]', ""))

    def test_build_runs_it_and_stores_it_beside_its_source(self, source):
        source(SOURCE)
        path = notebook_build.build("stage1_naive")
        stored = nbformat.read(path, as_version=4)
        nbformat.validate(stored)
        assert path.name == notebook_build.STORED
        assert [out.text for out in stored.cells[-1].outputs] == ["Ellipsis\n"]
        assert stored.metadata == notebook_build.METADATA

    def test_find_notebook(self):
        assert find_chapter("6") == find_chapter("stage6_api") == "stage6_api"
        with pytest.raises(InvalidValue, match="stage"):
            find_chapter("7")


def test_command_refuses_to_store_solutions(sixstage_error):
    assert "--out" in sixstage_error("notebooks", "1", "--solved")
    assert "stage" in sixstage_error("notebooks", "9")


@pytest.fixture
def sixstage_error(capsys):
    """Run the command line, which has to refuse; its one line."""
    from common.cli import main  # noqa: PLC0415

    def run(*words: str) -> str:
        assert main(list(words)) == 2
        return capsys.readouterr().err

    return run
