"""The CPU kernel as it is on other processors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from stage3_paged.kernels import cpu, cpu_layout


@contextmanager
def another_processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without 512-bit vectors; what has been remembered of this one is forgotten, before and after."""
    plans = cpu._plan_attention, cpu._plan_store
    with monkeypatch.context() as patch:
        patch.setattr(cpu_layout, "instructions", frozenset)
        for plan in plans:
            plan.cache_clear()
        yield
    for plan in plans:
        plan.cache_clear()
