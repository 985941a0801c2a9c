"""A model's shape for tests that need no model."""

from __future__ import annotations

import pytest
from support.scripted import scripted_config

from common.model.config import ModelConfig


@pytest.fixture
def tiny_config() -> ModelConfig:
    """One layer, one head."""
    return scripted_config()
