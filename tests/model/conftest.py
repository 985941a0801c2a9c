"""Fixtures of the model tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.model.zoo import make_tiny


@pytest.fixture
def tiny_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny Qwen2 (head not tied) in one file, and an empty cache."""
    monkeypatch.setenv("SIXSTAGE_CACHE", str(tmp_path / "cache"))
    return make_tiny("qwen2", tmp_path / "model")
