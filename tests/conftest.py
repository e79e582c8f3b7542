"""Fixtures for the whole suite."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagewire.config import DEFAULT_MODEL
from pagewire.files.models import resolve_model
from pagewire.files.tokenizer_files.loaded_tokenizer import LoadedTokenizer
from pagewire.files.tokenizer_files.loading import load_tokenizer
from tests.sweep import ByLine, deselect_repetitions, mixed

# Tests compute little at a time, and two or three of them at once: a thread each, read when torch is imported. Threads
# of OpenMP that wait busily for one another would take the processor of the other tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    deselect_repetitions(config, items)
    mixed(items)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByLine:
    return ByLine(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    # The collector need not walk through thousands of collected tests again and again.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def data_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Gateways that are given no --data-dir leave the user's alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The built-in model's file: PAGEWIRE_TEST_MODEL, or the user's cache, downloaded once."""
    return resolve_model(os.environ.get("PAGEWIRE_TEST_MODEL", DEFAULT_MODEL))


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> LoadedTokenizer:
    """The built-in model's tokenizer."""
    return load_tokenizer(smollm2_gguf)


@pytest.fixture(scope="session")
def reference_checkpoint(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model as transformers reads it, in fp32, with its tokenizer."""
    from tests.reference_checkpoint import converted  # imports torch

    return converted(smollm2_gguf, tmp_path_factory)


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The path of sentence-transformers' all-MiniLM-L6-v2, downloaded once into the user's cache."""
    return resolve_model("all-minilm-l6-v2")


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Gemma 3 270M in K-quants, under Google's Gemma terms: in the user's cache, downloaded once."""
    return resolve_model("gemma-3-270m", accepted_license="gemma")
