"""Command lines of `pagewire serve` and of single services, and what is said of those that are refused."""

from typing import Any

import pytest

from pagewire import config, flags
from pagewire.config import ServeConfig


def parse(*argv: str, config_class: type = ServeConfig, environ: dict[str, str] | None = None, **kwargs: Any) -> Any:
    """Returns the parsed configuration; kwargs go to `flags.parse`."""
    without = config.SET_BY_STACK if config_class is ServeConfig else ()
    return flags.parse(
        config_class,
        argv,
        environ=environ or {},
        **{"prog": "pagewire serve", "description": "", "positional": "model", "without": without, **kwargs},
    )


def refusal(capsys: pytest.CaptureFixture[str], *argv: str, **kwargs: Any) -> str:
    """Returns the error of a refused command line: one line, which names where to read more."""
    with pytest.raises(SystemExit) as exit_:
        parse(*argv, **kwargs)
    assert exit_.value.code == 2
    *said, hint = capsys.readouterr().err.splitlines()
    assert hint == "see `pagewire serve --help`"
    return "\n".join(said).removeprefix("pagewire serve: error: ")
