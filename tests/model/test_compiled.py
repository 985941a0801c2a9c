"""How numba code is made: what name it is kept under, and that it is found without a search."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from pathlib import Path
from types import ModuleType

from numba import njit
from numba.core.dispatcher import Dispatcher

import common.model
from common.compiled import compiled
from stage3_paged import kernels


def test_no_defaults() -> None:
    """Numba confuses defaults of one type, and from the second on looks for the code in Python at every call."""
    functions = {
        f"{name}.{attribute}": inspect.signature(value.py_func)
        for package in (common.model, kernels)
        for _, name, _ in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        if "triton" not in name
        for attribute, value in vars(importlib.import_module(name)).items()
        if isinstance(value, Dispatcher)
    }
    assert any("attend_short" in name for name in functions)
    with_default = [
        name
        for name, signature in functions.items()
        if any(p.default is not p.empty for p in signature.parameters.values())
    ]
    assert with_default == []


def test_a_change_elsewhere_is_a_new_name(tmp_path: Path) -> None:
    """The cache on disk only watches a function's own file: what it is built from is in the name it is kept under."""
    other = ModuleType("other")
    other.__file__ = str(tmp_path / "other.py")

    def name() -> str:
        return compiled(other)(lambda x: x + 1).py_func.__qualname__

    Path(other.__file__).write_text("a = 1\n")
    first, again = name(), name()
    Path(other.__file__).write_text("a = 2\n")
    assert first == again
    assert name() != first


def test_code_of_no_module() -> None:
    """Whoever compiles a function made from text is not disturbed by what the kernel announces."""
    importlib.import_module("stage3_paged.kernels.cpu")  # which listens from then on
    names: dict = {}
    exec("def double(x): return 2 * x", names)
    names["double"].__module__ = None
    assert njit(names["double"])(3) == 6
