"""Shared by all tests: which stages to run, and a clean, private model cache where a test wants one."""

from __future__ import annotations

import pytest

from common.stages import STAGES, find_stage


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --stage, to run the contract suite over one stage only."""
    parser.addoption("--stage", action="append", default=[], help="a stage's name or number; may be repeated")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `stage` runs once per registered stage, or per stage asked for."""
    if "stage" in metafunc.fixturenames:
        asked = metafunc.config.getoption("--stage")
        names = [find_stage(name)[0] for name in asked] or list(STAGES)
        metafunc.parametrize("stage", names)
