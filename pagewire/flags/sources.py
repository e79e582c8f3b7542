"""The YAML file and the environment, as sources of a configuration."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagewire.config import ServeConfig, vllm_flags
from pagewire.flags.given import Given
from pagewire.flags.names import ENVIRONMENT_PREFIX, did_you_mean, fields_of, flag_name, nearest
from pagewire.flags.values import UsageError


def from_file(fields: Mapping[str, dataclasses.Field[Any]], path: Path) -> list[Given]:
    """Returns the settings of a YAML file. Raises UsageError."""
    from pagewire.flags import yaml_file  # deferred: importing yaml is slow, and most commands have no file

    content = yaml_file.read(path)
    if content is None:
        return []
    if not isinstance(content, dict):
        raise UsageError(f"--config {path}: expected keys and values such as `max-num-seqs: 64`")
    given = []
    for key, value in content.items():
        flag = str(key).replace("_", "-")
        name = flag.replace("-", "_")
        if name not in fields and name != "profile" and flag not in vllm_flags.FLAGS:
            known = [flag_name(field)[2:] for field in fields]
            raise UsageError(f"{path}: unknown key {key}" + did_you_mean(flag, known))
        if value is not None:
            given.append(Given(name, text_of(value), f"{path}: {key}", "file"))
    return given


def text_of(value: Any) -> str | bool:
    """Returns a value as text, as a command line would have it."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    if isinstance(value, dict):
        return json.dumps(value)
    return value if isinstance(value, bool) else str(value)


def from_environment(fields: Mapping[str, dataclasses.Field[Any]], environ: Mapping[str, str]) -> list[Given]:
    """Returns the settings in environment variables. Raises UsageError for a misspelt variable.

    Variables for fields of other services are ignored, and so are variables that resemble no field: other parts of
    Pagewire read those (PAGEWIRE_CACHE_DIR).
    """
    known = {field.name.upper() for field in fields_of(ServeConfig)} | {name.upper() for name in fields}
    given = []
    for variable, text in environ.items():
        # Kubernetes announces a service named "pagewire" as PAGEWIRE_PORT=tcp://10.0.0.1:8000; that is not a setting.
        if not variable.startswith(ENVIRONMENT_PREFIX) or not text or text.startswith(("tcp://", "udp://")):
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX)
        if name.lower() in fields or name == "PROFILE":
            given.append(Given(name.lower(), text, variable, "environment"))
        elif name not in known and (match := nearest(name, known, cutoff=0.85)):
            raise UsageError(f"unknown variable {variable}; did you mean {ENVIRONMENT_PREFIX}{match}?")
    return given
