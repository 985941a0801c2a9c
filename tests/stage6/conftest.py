"""A live server over a scripted model for the tests of a file, or with settings of a test's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.live_server import NEWEST, SETTINGS, Live, serve


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    """One server for all tests of a file."""
    with serve() as server:
        yield server


@pytest.fixture
def with_settings():
    """Starts a server with other settings for a block: `with_settings(api_keys=("k",))`."""

    def start(stage: str = NEWEST, engine: dict | None = None, **changes: object):
        return serve(replace(SETTINGS, **changes), stage, **(engine or {}))

    return start
