"""The flags of the stack that `pagewire.LLM` starts."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagewire import flags
from pagewire.config import SET_BY_STACK, WITHOUT_TLS, ServeConfig
from pagewire.errors import StartupError
from pagewire.tools.llm.connection import echo

# The flags of the stack, without TLS, which a stack for only this program does not need.
_FIELDS = {f.name: f for f in dataclasses.fields(ServeConfig) if f.name not in (*SET_BY_STACK, *WITHOUT_TLS)}
# The only client is the program, which may read and write templates.
_DEFAULTS = {
    "log_level": "warning",
    "port": 0,
    "grpc_port": 0,
    "enable_tokenizer_info_endpoint": True,
    "trust_request_chat_template": True,
}


def config_of(model: str, serve: Mapping[str, Any]) -> ServeConfig:
    """Returns the configuration. Raises TypeError for an unknown flag, StartupError for one that has a bad value or is
    refused."""
    for name in serve:
        if name not in _FIELDS and not flags.is_of_vllm(name):
            match = flags.nearest(name, _FIELDS)
            raise TypeError(f"pagewire serve has no flag {name}" + (f"; did you mean {match}?" if match else ""))
    try:
        values, lines = flags.of_keywords(_FIELDS, {name: _plain(value) for name, value in serve.items()})
    except flags.UsageError as error:
        raise StartupError(str(error)) from error
    for line in lines:
        echo(f"pagewire.LLM: {line}")
    return ServeConfig(**{**_DEFAULTS, **values, "model": str(model)})


def _plain(value: Any) -> Any:
    """Returns a value of Python as a command line could have it; None for an empty one, which says nothing."""
    if isinstance(value, set | frozenset):
        value = sorted(value)
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {name: one for name, one in dataclasses.asdict(value).items() if one is not None}
    return None if value in ({}, [], (), "") else value
