"""Fixtures for the whole suite."""

import os
from pathlib import Path

import pytest

from pagewire.config import DEFAULT_MODEL
from pagewire.models import resolve_model


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The built-in model's file: PAGEWIRE_TEST_MODEL, or the user's cache, downloaded once."""
    return resolve_model(os.environ.get("PAGEWIRE_TEST_MODEL", DEFAULT_MODEL))
