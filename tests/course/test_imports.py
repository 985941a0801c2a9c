"""Who may import whom, and how long a file and a function may be; read from the syntax trees."""

import ast
from pathlib import Path

import pytest

from common.course.diff import stage_folder
from common.stages import IDEAS

LONGEST_FILE = 300
LONGEST_FUNCTION = 40
FOLDERS = {name: stage_folder(name) for name in ("common", *IDEAS)}
FILES = [(package, path) for package, folder in FOLDERS.items() for path in sorted(folder.rglob("*.py"))]
TESTS = Path(__file__).parents[1]
TRICKS = ("sys.path", "os.chdir", "site.addsitedir")


def is_stage(name: str) -> bool:
    return name.startswith("stage") and name[5:6].isdigit()


def imported(source: str) -> set[str]:
    """Top-level packages that a file imports, also inside functions and by `import_module("literal")`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add("." if node.level else node.module or "")
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func)
            if called.endswith(("import_module", "__import__")):
                found.add(str(node.args[0].value))
    return {name.partition(".")[0] or "." for name in found}


def import_faults(package: str, source: str) -> list[str]:
    """Imports that point the wrong way: common to a stage, a stage to a later one, relative ones."""
    faults = []
    for name in sorted(imported(source)):
        if name == ".":
            faults.append("relative import: the line would not say where the code was born")
        elif package == "common" and is_stage(name):
            faults.append(f"common imports {name}")
        elif is_stage(package) and is_stage(name) and name[5] > package[5]:
            faults.append(f"{package} imports the later {name}")
        elif name == "tests":
            faults.append("product code imports tests")
    return faults


def path_tricks(source: str) -> list[str]:
    """Ways to make an import work that the installation does not provide."""
    tricks = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in (
            "sys.path",
            "os.chdir",
            "site.addsitedir",
        ):
            tricks.append(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom) and node.module == "sys":
            tricks += ["sys.path" for alias in node.names if alias.name == "path"]
    return tricks


def function_lengths(source: str) -> dict[str, int]:
    """Lines of each function's body: without decorators, signature and docstring, which are read as one."""
    lengths = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0]
            documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            start = first.end_lineno if documented else first.lineno - 1
            lengths[f"{node.name}:{node.lineno}"] = node.end_lineno - start
    return lengths


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def label(value: object) -> str | None:
    return f"{value.parent.name}/{value.name}" if isinstance(value, Path) else None


@pytest.mark.parametrize(("package", "path"), FILES, ids=label)
def test_imports_point_down(package, path):
    assert import_faults(package, read(path)) == []


@pytest.mark.parametrize("path", [*(path for _, path in FILES), *sorted(TESTS.rglob("*.py"))], ids=label)
def test_no_path_tricks(path):
    assert path_tricks(read(path)) == []


@pytest.mark.parametrize(("package", "path"), FILES, ids=label)
def test_files_and_functions_are_short(package, path):
    source = read(path)
    assert len(source.splitlines()) < LONGEST_FILE
    assert {name: n for name, n in function_lengths(source).items() if n >= LONGEST_FUNCTION} == {}


class TestGuards:
    """The guards above see what they are there for."""

    @pytest.mark.parametrize(
        ("package", "source"),
        [
            ("common", "import stage1_naive.engine"),
            ("common", "def f():\n    from stage2_kvcache import engine"),
            ("common", "from importlib import import_module\nimport_module('stage3_paged.engine')"),
            ("common", "__import__('stage1_naive')"),
            ("stage2_kvcache", "from stage3_paged.block_pool import BlockPool"),
            ("stage2_kvcache", "from .kv_cache import ContiguousCache"),
            ("stage1_naive", "from tests.support import tiny"),
        ],
    )
    def test_wrong_imports_are_seen(self, package, source):
        assert len(import_faults(package, source)) == 1

    def test_right_imports_pass(self):
        source = "from common.batch import x\nimport torch\nfrom stage2_kvcache.kv_cache import y"
        assert import_faults("stage3_paged", source) == []

    def test_path_tricks_are_seen(self):
        for source in (
            "import sys\nsys.path.insert(0, '..')",
            "from sys import path",
            "import os\nos.chdir('x')",
        ):
            assert len(path_tricks(source)) == 1

    def test_length_is_that_of_the_body(self):
        body = "    x = 1\n\n    return x\n"
        assert function_lengths(f"@deco\ndef f(\n    a,\n):\n{body}") == {"f:2": 3}
        assert function_lengths(f'def f():\n    """One.\n\n    Two.\n    """\n{body}') == {"f:1": 3}
