"""Log lines of services that a supervisor starts."""

import json
import logging
from collections.abc import Iterator

import pytest

from pagewire.config import ExecutorConfig
from pagewire.telemetry import logs


@pytest.fixture
def root() -> Iterator[None]:
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.mark.usefixtures("root")
def test_a_line_says_which_of_several_executors_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, log_format in (("executor-1", "text"), ("executor-1", "json"), ("gateway-1", "text")):
        monkeypatch.setenv(logs.NAME, name)
        logs.setup("executor", ExecutorConfig(log_format=log_format))
        logging.getLogger("x").warning("hello")
    monkeypatch.setenv(logs.NAME, "executor-1 of m%s")
    for log_format in ("text", "json"):
        logs.setup("executor", ExecutorConfig(log_format=log_format))
        logging.getLogger("x").warning("hello")
    text, line, other, of_model, of_model_json = capsys.readouterr().err.splitlines()
    assert text.endswith("W executor-1 hello") and json.loads(line)["service"] == "executor-1"
    assert other.endswith("W executor  hello")
    assert of_model.endswith("W executor-1 [m%s] hello")
    assert {"service": "executor-1", "model": "m%s"}.items() <= json.loads(of_model_json).items()
