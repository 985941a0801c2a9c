"""A marker that begins within another one's beginning."""

from __future__ import annotations

import pytest
from test_tools_hermes import WEATHER, call, parse

from stage6_api.tool_events import Text


@pytest.mark.parametrize("before", ["<", "<tool", "<tool_call", " <", "a<<"])
def test_what_breaks_a_marker_can_begin_one(before: str) -> None:
    """The character that ends a false beginning may be the first of the real one."""
    assert parse(before + WEATHER) == [Text(before), *call(0, "weather", '{"city": "Bern"}')]
