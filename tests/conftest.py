"""Shared by all tests: which stages to run, and a clean, private model cache where a test wants one."""

from __future__ import annotations

from functools import partialmethod

import pytest

from common.config import EngineConfig
from common.stages import STAGES, find_stage

# Modules that assert for the tests: a failure in one shows its values too.
pytest.register_assert_rewrite("support", "desk", "graph_cases", "paged_cases")

from support.browser import browser  # noqa: E402, F401 - a fixture


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --stage, to run the contract suite over one stage only."""
    parser.addoption("--stage", action="append", default=[], help="a stage's name or number; may be repeated")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `stage` runs once per registered stage, or per stage asked for."""
    if "stage" in metafunc.fixturenames:
        asked = metafunc.config.getoption("--stage")
        names = [find_stage(name)[0] for name in asked] or list(STAGES)
        sharing = [name for name in names if find_stage(name)[1].number >= 5]
        uncached = [pytest.param(name, marks=pytest.mark.uncached, id=f"{name}-uncached") for name in sharing]
        metafunc.parametrize("stage", [*names, *uncached])


@pytest.fixture(autouse=True)
def _no_prefix_cache_where_marked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite runs twice over stages that share prefixes: with their cache, and with it switched off."""
    if request.node.get_closest_marker("uncached"):
        uncached = partialmethod(EngineConfig.__init__, enable_prefix_caching=False)
        monkeypatch.setattr(EngineConfig, "__init__", uncached)
