"""Cutting exercises out of source text, and putting a learner's function into it, by the syntax tree.

A function is found by its qualified name ("BlockTables.allocate").  What is cut of it is its body, or a part:

    "for.body"            the body of its first `for` loop; the line with `for` stays
    "if[1]"               its second `if` statement, whole
    "while/if.body"       inside the first `while`, the body of the first `if`
    "assign[2]..return"   from one statement to another

Kinds are the names of the tree's nodes in small letters; only statements are counted, and only those of the
same block.  Lines are replaced, not trees printed, so all comments and the layout around them stay.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Hole(Protocol):
    """What is needed to know of an exercise here."""

    @property
    def id(self) -> str:
        """Such as "3.2"."""
        ...

    @property
    def title(self) -> str:
        """For the comment that stands in the hole."""
        ...

    @property
    def cut(self) -> str:
        """Qualified name of the function."""
        ...

    @property
    def part(self) -> str:
        """What of it is cut; "" for the whole body."""
        ...


@dataclass(frozen=True)
class Lines:
    """Lines `first ... last` of a file, counted from 1, both included."""

    first: int
    last: int

    def of(self, source: str) -> str:
        """Their text, with the last line's end."""
        return "".join(source.splitlines(keepends=True)[self.first - 1 : self.last])

    def replaced(self, source: str, text: str) -> str:
        """The source with other text in their place."""
        lines = source.splitlines(keepends=True)
        return "".join([*lines[: self.first - 1], text, *lines[self.last :]])


class NoSuchFunction(LookupError):
    """A file has no function of this name; the message is for its author."""


def function_lines(source: str, cut: str) -> Lines:
    """Where a function is, decorators included.

    Raises:
        NoSuchFunction: it is nowhere.
        SyntaxError: the source is not Python.
    """
    node = _function(source, cut)
    return Lines(min([node.lineno, *(deco.lineno for deco in node.decorator_list)]), _end(node))


def hole_lines(source: str, hole: Hole) -> Lines:
    """Where the lines are that an exercise leaves to the learner."""
    function = _function(source, hole.cut)
    if not hole.part:
        return Lines(_header_end(function) + 1, _end(function))
    first, last = (_resolve(function, path) for path in _ends(hole.part))
    return Lines(first.first, last.last)


def blanked(source: str, holes: Iterable[Hole]) -> str:
    """The source with every exercise cut out: a comment and an error in place of the code."""
    places = sorted(((hole_lines(source, hole), hole) for hole in holes), key=lambda pair: -pair[0].first)
    for lines, hole in places:  # from the end, so that the other places stay where they are
        first = next(line for line in lines.of(source).splitlines() if line.strip())
        indent = first[: len(first) - len(first.lstrip())]
        text = f"{indent}# TODO {hole.id}: {hole.title}\n{indent}raise {marker(hole.id)}\n"
        source = lines.replaced(source, text)
    return source


def marker(exercise_id: str) -> str:
    """What stands in a hole as long as nobody has filled it."""
    return f'NotImplementedError("exercise {exercise_id}")'


def is_blank(source: str, hole: Hole) -> bool:
    """Whether nobody has filled the hole yet.

    Raises:
        NoSuchFunction: the source has no such function.
        SyntaxError: it is not Python.
    """
    return marker(hole.id) in function_lines(source, hole.cut).of(source)


def transplanted(reference: str, donor: str, cut: str) -> tuple[str, Lines, int]:
    """The reference with one function taken from another file.

    Returns:
        The text, where the function is in it, and what to add to a line number there to get the donor's.

    Raises:
        NoSuchFunction: the donor has no such function.
        SyntaxError: the donor is not Python.
    """
    ours, theirs = function_lines(reference, cut), function_lines(donor, cut)
    text = theirs.of(donor)
    if not text.endswith("\n"):
        text += "\n"
    first, count = ours.first, theirs.last - theirs.first
    return ours.replaced(reference, text), Lines(first, first + count), theirs.first - first


def _function(source: str, cut: str) -> Function:
    block: list[ast.stmt] = ast.parse(source).body
    *classes, name = cut.split(".")
    for wanted in classes:
        found = [node for node in block if isinstance(node, ast.ClassDef) and node.name == wanted]
        if not found:
            raise NoSuchFunction(f"there is no class {wanted} any more")
        block = found[-1].body
    functions = [node for node in block if isinstance(node, Function) and node.name == name]
    if not functions:
        raise NoSuchFunction(f"there is no function {cut} any more")
    return functions[-1]


def _ends(part: str) -> tuple[str, str]:
    first, _, last = part.partition("..")
    return first, last or first


def _resolve(function: Function, path: str) -> Lines:
    """Lines of one statement, or of its body."""
    path, _, body = path.partition(".")
    block, node = function.body, None
    for step in path.split("/"):
        kind, _, number = step.partition("[")
        like = [each for each in block if type(each).__name__.lower() == kind]
        node = like[int(number.rstrip("]") or 0)]
        block = getattr(node, "body", [])
    assert node is not None, "a path has at least one step"
    return Lines(_header_end(node) + 1 if body else node.lineno, _end(node))


def _header_end(node: ast.stmt) -> int:
    """Last line of what stands before a block's own code: the line with the colon, and a docstring."""
    first = node.body[0]  # type: ignore[attr-defined]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    if isinstance(node, Function) and documented:
        return _end(first)
    if isinstance(node, Function):
        heads: list[ast.AST] = [node.args, *node.args.args, *node.args.kwonlyargs]
        heads += [node.returns] if node.returns else []
    else:
        heads = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
    return max([node.lineno, *(getattr(head, "end_lineno", 0) or 0 for head in heads)])


def _end(node: ast.stmt) -> int:
    assert node.end_lineno is not None, "a parsed node has one"
    return node.end_lineno
