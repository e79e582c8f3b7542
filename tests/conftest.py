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


@pytest.fixture(scope="session")
def minilm() -> Path:
    """all-MiniLM-L6-v2 of sentence-transformers: in the user's cache, downloaded once."""
    return resolve_model("all-minilm-l6-v2")


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Gemma 3 270M in K-quants, under Google's Gemma terms: in the user's cache, downloaded once."""
    return resolve_model("gemma-3-270m", accepted_license="gemma")
