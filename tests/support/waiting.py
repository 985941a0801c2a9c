"""Wait for something that another thread brings about."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object], seconds: float = 5.0) -> None:
    """Return as soon as the condition holds; fail if it does not within the time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.005)
