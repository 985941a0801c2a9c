"""A stage differs from the stage before in what its `course.toml` states, and in nothing else."""

import sys
from html.parser import HTMLParser
from io import StringIO

import pytest
from rich.console import Console

from common.course.diff import (
    FileDiff,
    compare,
    function_sources,
    imported_modules,
    read_stage,
    render,
    stage_diff,
    stage_folder,
    to_html,
)
from common.errors import InvalidValue
from common.stages import STAGES, find_stage

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest there

LONGEST_ENGINE = 130
KEYS = {"base", "new", "left_behind", "rewritten", "edited"}
EDIT_KEYS = {"budget", "changed", "added", "removed"}


def plan(stage: str) -> dict:
    return tomllib.loads((stage_folder(stage) / "course.toml").read_text(encoding="utf-8"))["diff"]


def budget_faults(file: FileDiff, allowed: dict) -> list[str]:
    """What in one edited file goes beyond what `course.toml` allows it."""
    faults = []
    lines = file.added + file.removed
    if lines > allowed["budget"]:
        faults.append(f"{file.name}: {lines} lines changed, budget {allowed['budget']}")
    for what, found in (
        ("changed", file.changed_functions),
        ("added", file.new_functions),
        ("removed", file.gone_functions),
    ):
        faults += [f"{file.name}: {name} {what}, not declared" for name in found
                   if name not in allowed.get(what, [])]  # fmt: skip
        faults += [f"{file.name}: {name} declared as {what}, but is not" for name in allowed.get(what, [])
                   if name not in found]  # fmt: skip
    return faults


def order_faults(old: str, new: str) -> list[str]:
    """Functions that both files have, but in another order."""
    old_names, new_names = list(function_sources(old)), list(function_sources(new))
    kept_in_old = [name for name in old_names if name in new_names]
    kept_in_new = [name for name in new_names if name in old_names]
    return [f"{a} stands where {b} stood" for a, b in zip(kept_in_new, kept_in_old, strict=True) if a != b]


NEIGHBOURS = list(zip(STAGES, list(STAGES)[1:], strict=False))


@pytest.mark.parametrize("name", STAGES)
def test_plan_is_well_formed(name):
    diff = plan(name)
    assert set(diff) <= KEYS
    before = dict(zip(list(STAGES)[1:], STAGES, strict=False)).get(name, "")
    assert diff["base"] == before
    for allowed in diff.get("edited", {}).values():
        assert set(allowed) <= EDIT_KEYS


def test_first_stage_has_no_undeclared_file():
    assert set(read_stage("stage1_naive")) == set(plan("stage1_naive")["new"])


@pytest.mark.parametrize(("before", "after"), NEIGHBOURS)
def test_files_are_as_declared(before, after):
    diff, allowed = stage_diff(before, after), plan(after)
    declared = {kind: set(allowed.get(kind, ())) for kind in ("new", "rewritten", "edited")}
    found = {kind: {file.name for file in diff.of_kind(kind)} for kind in declared}
    assert found == declared
    assert not diff.of_kind("same"), "an unchanged file is imported from where it was born, not copied"
    left = {file.name for file in diff.of_kind("left behind")}
    assert left == set(allowed.get("left_behind", ()))


@pytest.mark.parametrize(("before", "after"), NEIGHBOURS)
def test_edited_files_stay_in_budget(before, after):
    allowed = plan(after).get("edited", {})
    faults = [fault for file in stage_diff(before, after).of_kind("edited")
              for fault in budget_faults(file, allowed[file.name])]  # fmt: skip
    assert faults == []


@pytest.mark.parametrize(("before", "after"), NEIGHBOURS)
def test_edited_files_keep_the_order_of_functions(before, after):
    old, new = read_stage(before), read_stage(after)
    for name in plan(after).get("edited", {}):
        assert order_faults(old[name], new[name]) == [], name


@pytest.mark.parametrize("name", STAGES)
def test_engine_is_read_in_one_sitting(name):
    assert len(read_stage(name)["engine.py"].splitlines()) <= LONGEST_ENGINE


OLD = """\
import os


class Old:
    def a(self):
        return 1

    def b(self):
        return 2

    @property
    def c(self):
        return 3
"""


class TestGuards:
    """The guards above see what they are there for."""

    def test_changed_added_and_gone_functions(self):
        new = OLD.replace("Old", "New").replace("return 2", "return 22").replace("def c", "def d")
        file = compare("engine.py", OLD, new)
        assert (file.kind, file.added, file.removed) == ("edited", 3, 3)
        assert file.changed_functions == ("b",)
        assert (file.new_functions, file.gone_functions) == (("d",), ("c",))

    def test_decorator_counts_as_part_of_the_function(self):
        assert compare("e.py", OLD, OLD.replace("    @property\n", "")).changed_functions == ("c",)

    def test_budget_and_undeclared_functions_are_reported(self):
        file = compare("engine.py", OLD, OLD.replace("return 2", "return 22"))
        assert budget_faults(file, {"budget": 2, "changed": ["b"]}) == []
        assert budget_faults(file, {"budget": 1, "changed": ["b"]}) == [
            "engine.py: 2 lines changed, budget 1"
        ]
        assert budget_faults(file, {"budget": 9}) == ["engine.py: b changed, not declared"]
        assert budget_faults(file, {"budget": 9, "changed": ["a", "b"]}) == [
            "engine.py: a declared as changed, but is not"
        ]

    def test_swapped_functions_are_reported(self):
        a, b = "    def a(self):\n        return 1\n", "    def b(self):\n        return 2\n"
        swapped = OLD.replace(f"{a}\n{b}", f"{b}\n{a}")
        assert swapped != OLD
        assert order_faults(OLD, swapped)
        assert order_faults(OLD, OLD + "\n\ndef last():\n    pass\n") == []

    def test_kinds(self):
        assert compare("x.py", OLD, OLD).kind == "same"
        assert compare("x.py", None, OLD).kind == "new"
        assert compare("x.py", OLD, None).kind == "left behind"
        assert compare("x.py", OLD, "def other():\n    return 'nothing kept'\n").kind == "rewritten"

    def test_same_name_twice_is_told_apart(self):
        source = "class A:\n    def f(self): ...\n\n\nclass B:\n    def f(self): ...\n"
        assert list(function_sources(source)) == ["f", "f#2"]

    def test_imports_are_followed_into_lower_stages(self):
        """stage2's engine names its own cache, which nobody else imports: two modules, found through one."""
        source = (
            "from stage2_kvcache import engine\nfrom common.batch import A\nimport stage1_naive.no_such\n"
        )
        assert imported_modules("stage9", {"engine.py": source}) == [
            "stage2_kvcache.engine",
            "stage2_kvcache.kv_cache",
        ]

    def test_a_stage_does_not_import_from_itself(self):
        assert imported_modules("stage2_kvcache", read_stage("stage2_kvcache")) == []


def test_counts_agree_with_a_replay_of_the_diff():
    """Undo the unified diff's lines by hand: context and '-' lines must be the old file's, in order."""
    old = read_stage("stage1_naive")["engine.py"].splitlines()
    new = read_stage("stage2_kvcache")["engine.py"].splitlines()
    file = next(f for f in stage_diff(1, 2).files if f.name == "engine.py")
    assert len(new) - len(old) == file.added - file.removed
    rest_old, rest_new = iter(old), iter(new)
    for line in file.lines:
        if line[0] in " -":
            assert line[1:] in rest_old
        if line[0] in " +":
            assert line[1:] in rest_new


def test_the_server_changes_nothing_below_it():
    """All its files are new, all of stage 5 is used as it is, and the page says so."""
    diff = stage_diff(5, 6)
    assert {file.kind for file in diff.files} == {"new"}
    assert "async_engine.py" in {file.name for file in diff.files}
    assert diff.imported == ("stage5_prefix_sharing",)
    assert "imported unchanged: <code>stage5_prefix_sharing</code>" in to_html(diff)
    out = StringIO()
    Console(file=out, width=120).print(render(diff))
    assert "stage5_prefix_sharing → stage6_api: the same engine" in out.getvalue()


@pytest.mark.parametrize("pair", [(1, 9), ("stage1", 2), (2, 2)])
def test_unknown_or_equal_stages_are_refused(pair):
    with pytest.raises(InvalidValue, match="stage: got"):
        stage_diff(*pair)


def test_names_and_numbers_mean_the_same():
    assert stage_diff(1, "2") == stage_diff("stage1_naive", find_stage(2)[0])


def test_terminal_text_shows_edits_in_colour_and_the_summary():
    out = StringIO()
    Console(file=out, width=120, force_terminal=True, color_system="standard").print(render(stage_diff(1, 2)))
    text = out.getvalue()
    assert "\x1b[32m+    def _form_batch" in text
    assert "\x1b[31m-from stage1_naive.no_cache import NoCache" in text
    assert "class ContiguousCache" not in text  # a new file is read in itself


def test_terminal_text_can_show_everything():
    out = StringIO()
    Console(file=out, width=120).print(render(stage_diff(1, 2), everything=True))
    assert "+class ContiguousCache" in out.getvalue()


class _Page(HTMLParser):
    """Collects text and open tags, and what the page would fetch."""

    def __init__(self):
        super().__init__()
        self.text, self.open, self.fetched = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta",):
            self.open.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_html_page_is_self_contained_and_holds_the_diff_verbatim():
    diff = stage_diff(1, 2)
    page = _Page()
    page.feed(to_html(diff).replace("<!doctype html>", ""))
    assert page.open == []
    assert page.fetched == []
    text = "".join(page.text)
    for line in next(f for f in diff.files if f.name == "engine.py").lines:
        assert line in text  # "->" and quotes survive escaping
    assert "@import" not in text
    assert "url(" not in text
