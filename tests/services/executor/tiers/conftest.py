"""A tiny model with its files, and sockets for executors."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire.config import ExecutorConfig
from pagewire.services.executor.models.protocol import Model
from tests.services.executor.helpers.stepping import tiny_llama, write_tiny_llama


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The same model, for a second executor: a model is bound to the memory of one."""
    return tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture
def sockets() -> Iterator[list[str]]:
    with tempfile.TemporaryDirectory(prefix="pw-") as directory:
        yield [f"unix:{directory}/executor-{index}.sock" for index in range(2)]


@pytest.fixture
def plain(tmp_path: Path) -> ExecutorConfig:
    """A config without tiers."""
    return ExecutorConfig(model=str(write_tiny_llama(tmp_path / "model")))
