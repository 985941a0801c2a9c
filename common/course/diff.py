"""What one stage changes in another, read from the installed packages: `sixstage diff 1 2`.

A stage's chapter is its difference to the stage before it.  Files with the same name in both folders are
compared line by line; when less than half of the shorter one's lines are kept, the file counts as rewritten,
since its line diff would tell nobody anything.
"""

from __future__ import annotations

import ast
import difflib
import html
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from common.errors import InvalidValue
from common.stages import IDEAS, find_chapter

Kind = Literal["edited", "rewritten", "new", "same", "left behind"]

STYLES = {"+": "green", "-": "red", "@": "cyan"}
"""Colour of a diff line, by its first character."""


@dataclass(frozen=True)
class FileDiff:
    """One file of two stages.

    Attributes:
        name: path inside the stage's folder, with forward slashes.
        lines: the unified diff, line by line, without the two header lines.
        added, removed: how many lines of each.
        changed_functions, new_functions, gone_functions: bare names, in file order.
    """

    name: str
    kind: Kind
    lines: tuple[str, ...] = ()
    added: int = 0
    removed: int = 0
    changed_functions: tuple[str, ...] = ()
    new_functions: tuple[str, ...] = ()
    gone_functions: tuple[str, ...] = ()


@dataclass(frozen=True)
class StageDiff:
    """All files of two stages, and what the later one takes from other stages instead of copying it.

    Attributes:
        files: sorted by name; without those files of `before` that `after` imports.
        imported: modules ("stage3_paged.block_pool") that `after` imports, directly or through another;
            a package stands for all that is in it.
    """

    before: str
    after: str
    files: tuple[FileDiff, ...]
    imported: tuple[str, ...]

    def of_kind(self, *kinds: Kind) -> list[FileDiff]:
        """The files of these kinds."""
        return [file for file in self.files if file.kind in kinds]


def stage_diff(before: str | int, after: str | int) -> StageDiff:
    """Compare two stages, by name ("stage2_kvcache") or number (2, "2").

    A stage without an `engine.py` (the server) works on the other's engine as it is and leaves nothing behind.

    Raises:
        InvalidValue: there is no such stage, or both are the same one.
    """
    old_name, new_name = find_chapter(before), find_chapter(after)
    if old_name == new_name:
        raise InvalidValue("stage", after, f"a stage other than {old_name}")
    old, new = read_stage(old_name), read_stage(new_name)
    if "engine.py" not in new:
        files = [compare(name, None, source) for name, source in sorted(new.items())]
        return StageDiff(old_name, new_name, tuple(files), (old_name,))
    imported = imported_modules(new_name, new)
    taken = tuple(f"{module}." for module in imported)
    names = {name for name in old if not f"{_module(old_name, name)}.".startswith(taken)} | new.keys()
    files = [compare(name, old.get(name), new.get(name)) for name in sorted(names)]
    return StageDiff(old_name, new_name, tuple(files), tuple(imported))


def read_stage(name: str) -> dict[str, str]:
    """Path inside the folder -> source, of every Python file of a stage that says more than its title."""
    folder = stage_folder(name)
    sources = {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*.py"))
    }
    return {name: source for name, source in sources.items() if not _is_title(source)}


def stage_folder(name: str) -> Path:
    """Folder of a stage's package, wherever it is installed; the stage itself is not imported."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise InvalidValue("stage", name, "an installed package")
    return Path(next(iter(spec.submodule_search_locations)))


def compare(name: str, old: str | None, new: str | None) -> FileDiff:
    """Compare one file's two sources; None where a stage does not have it."""
    old_lines, new_lines = (old or "").splitlines(), (new or "").splitlines()
    lines = tuple(difflib.unified_diff(old_lines, new_lines, lineterm="", n=3))[2:]
    added = sum(line.startswith("+") for line in lines)
    removed = sum(line.startswith("-") for line in lines)
    kept = len(new_lines) - added
    kind: Kind
    if old is None or new is None:
        kind = "new" if old is None else "left behind"
    elif old == new:
        kind = "same"
    else:
        kind = "edited" if 2 * kept >= min(len(old_lines), len(new_lines)) else "rewritten"
    old_functions, new_functions = function_sources(old or ""), function_sources(new or "")
    return FileDiff(
        name,
        kind,
        lines,
        added,
        removed,
        tuple(f for f in new_functions if f in old_functions and old_functions[f] != new_functions[f]),
        tuple(f for f in new_functions if f not in old_functions),
        tuple(f for f in old_functions if f not in new_functions),
    )


def function_sources(source: str) -> dict[str, str]:
    """Name -> exact text (decorators included) of the functions and methods of a file, in file order.

    Classes are left out of the name, because a stage's engine has a name of its own; a name's second
    appearance is called `name#2`.
    """
    lines, sources, seen = source.splitlines(), {}, Counter[str]()
    for node in _functions(ast.parse(source)):
        seen[node.name] += 1
        name = node.name if seen[node.name] == 1 else f"{node.name}#{seen[node.name]}"
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        sources[name] = "\n".join(lines[first - 1 : node.end_lineno])
    return sources


def imported_modules(stage: str, sources: dict[str, str]) -> list[str]:
    """Modules of other stages that a stage's files import, and what those import in turn; a package is one of them."""
    found: set[str] = set()
    todo = list(sources.values())
    while todo:
        for module in _imports(todo.pop()):
            home = module.partition(".")[0]
            if home not in IDEAS or home == stage or module in found:
                continue
            known = {_module(home, name): source for name, source in read_stage(home).items()}
            if module in known:
                found.add(module)
                todo.append(known[module])
    return sorted(module for module in found if module.rpartition(".")[0] not in found)


def render(diff: StageDiff, everything: bool = False) -> RenderableType:
    """The diff for a terminal: edited files in colour, then the summary.

    Args:
        diff: what `stage_diff` found.
        everything: show the text of new and rewritten files too.
    """
    shown = diff.of_kind("edited", "rewritten", "new") if everything else diff.of_kind("edited")
    parts: list[RenderableType] = []
    for file in shown:
        old = "/dev/null" if file.kind == "new" else f"{diff.before}/{file.name}"
        parts.append(Text(f"--- {old}\n+++ {diff.after}/{file.name}", style="bold"))
        parts += [Text(line, style=STYLES.get(line[:1], ""), overflow="fold") for line in file.lines]
        parts.append(Text())
    return Group(*parts, _summary(diff))


def to_html(diff: StageDiff) -> str:
    """The diff as one self-contained page that follows the reader's light or dark setting."""
    title = f"{diff.before} → {diff.after}"
    idea = IDEAS[diff.after]
    rows = "\n".join(
        f"<tr><td>{html.escape(file.name)}</td><td>{file.kind}</td><td class='add'>+{file.added}</td>"
        f"<td class='del'>-{file.removed}</td><td>{_functions_cell(file)}</td></tr>"
        for file in diff.files
    )
    names = ", ".join(f"<code>{html.escape(module)}</code>" for module in diff.imported)
    imported = f"<p>imported unchanged: {names}</p>" if names else ""
    return (
        f"<!doctype html>\n<html lang='en'>\n<head><meta charset='utf-8'><title>{title}</title>"
        "<meta name='viewport' content='width=device-width'>\n"
        f"<style>{_CSS}</style></head>\n<body>\n<h1>{title}</h1>\n<p>The idea: {html.escape(idea)}.</p>\n"
        "<table><tr><th>file</th><th></th><th>added</th><th>removed</th><th>functions</th></tr>\n"
        f"{rows}\n</table>\n{imported}\n{''.join(_html_files(diff))}</body>\n</html>\n"
    )


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions of a module and methods of its classes, in file order; nested functions belong to theirs."""
    for node in tree.body:
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield inner


def _imports(source: str) -> set[str]:
    """Whatever an import statement may name: modules, and what is taken from them (it may be one as well)."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return names | {name.rpartition(".")[0] for name in names}


def _module(stage: str, name: str) -> str:
    """Module of a file: "stage3_paged", "kernels/__init__.py" is stage3_paged.kernels."""
    return f"{stage}.{name[:-3].replace('/', '.')}".removesuffix(".__init__")


def _is_title(source: str) -> bool:
    """Whether a file holds nothing but a docstring (a package's `__init__.py`)."""
    return all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
               for node in ast.parse(source).body)  # fmt: skip


def _functions_note(file: FileDiff) -> str:
    """Which functions an edited file changed; a new file's functions are all new, so nothing is said."""
    if file.kind not in ("edited", "rewritten"):
        return ""
    signs = [("", file.changed_functions), ("+", file.new_functions), ("-", file.gone_functions)]
    return ", ".join(sign + name for sign, names in signs for name in names)


def _functions_cell(file: FileDiff) -> str:
    """The same for a page, where a line must not break behind the minus of a function that is gone."""
    return html.escape(_functions_note(file)).replace("-", "&#8209;")


def _summary(diff: StageDiff) -> RenderableType:
    table = Table(box=None, header_style="bold")
    table.add_column("file", no_wrap=True)
    table.add_column("")
    table.add_column("added", justify="right", style=STYLES["+"])
    table.add_column("removed", justify="right", style=STYLES["-"])
    for file in diff.files:
        table.add_row(file.name, file.kind, str(file.added), str(file.removed))
    for module in diff.imported:
        table.add_row(module, "imported unchanged", "", "")
    notes = [f"{f.name}, functions (+ new, - gone): {_functions_note(f)}" for f in diff.of_kind("edited")]
    title = Text(f"{diff.before} → {diff.after}: {IDEAS[diff.after]}", style="bold")
    return Group(title, Text(), table, Text(), *(Text(note) for note in notes))


def _html_files(diff: StageDiff) -> Iterator[str]:
    """The text of each file that has something to read; only edited files are open at first."""
    classes = {"+": "add", "-": "del", "@": "hunk"}
    for file in diff.of_kind("edited", "rewritten", "new"):
        lines = "\n".join(
            f"<span class='{classes.get(line[:1], 'same')}'>{html.escape(line)}</span>" for line in file.lines
        )
        opened = " open" if file.kind == "edited" else ""
        yield (f"<details{opened}><summary>{html.escape(file.name)} ({file.kind})</summary>"
               f"<pre>{lines}</pre></details>\n")  # fmt: skip


_CSS = """
:root { color-scheme: light dark; --add: #e3f6e6; --del: #fce8e8; --hunk: #5a6b8c; --line: #d0d5dd; }
@media (prefers-color-scheme: dark) {
  :root { --add: #123a1c; --del: #4a1a1c; --hunk: #9db2dc; --line: #444; }
}
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem; border-bottom: 1px solid var(--line); }
th { text-align: left; } summary { cursor: pointer; font-weight: 600; margin-top: 1rem; }
pre { overflow-x: auto; border: 1px solid var(--line); padding: .5rem; }
pre { font: 13px/1.45 ui-monospace, monospace; }
pre span { display: inline-block; min-width: 100%; }
pre .add { background: var(--add); } pre .del { background: var(--del); } pre .hunk { color: var(--hunk); }
"""
