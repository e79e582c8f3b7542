"""Defaults of sampling parameters: the model's, from `generation_config.json`, and the operator's."""

import json
import logging
from pathlib import Path
from typing import Any

from pagewire.config import TokenizerConfig
from pagewire.config.sampling_checks import check_value
from pagewire.config.sampling_params import BY_NAME
from pagewire.errors import InvalidRequest, StartupError
from pagewire.files.json_file import read_json_object
from pagewire.v1.common_pb2 import SamplingParams

logger = logging.getLogger(__name__)

FILE = "generation_config.json"
# Its keys that are read, as vLLM reads them, and the parameters for which they are the defaults. max_new_tokens is also
# the limit of requests that ask for more (`sampling_params` of text_requests.py).
KEYS = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")} | {
    "max_new_tokens": "max_tokens"
}


def read_generation_defaults(config: TokenizerConfig, model_path: Path) -> SamplingParams:
    """Reads the defaults of the model and the operator; for all other parameters Pagewire's apply.

    model_path: directory or file of the model; its generation_config.json is read for "auto". Raises StartupError.
    """
    source = config.generation_config
    remedy = "correct it, or start with --generation-config vllm"
    defaults: dict[str, float] = {}
    if source == "auto":
        file = model_path / FILE
        if file.is_file():
            defaults = _values(_read_json(file), str(file), remedy)
    elif source != "vllm":
        path = Path(source).expanduser()
        file = path / FILE if path.is_dir() else path
        if not file.is_file():
            raise StartupError(f"--generation-config {source}: there is no such file, and no directory with {FILE}")
        defaults = _values(_read_json(file), str(file), remedy)
    if config.override_generation_config is not None:
        defaults |= _overrides(config.override_generation_config)
    if defaults:
        listed = ", ".join(
            f"{name} {value:g}" + (", the most of any request" if name == "max_tokens" else "")
            for name, value in defaults.items()
        )
        logger.info("defaults of requests: %s (--generation-config vllm ignores the model's)", listed)
    return SamplingParams(**defaults)  # type: ignore[arg-type]  # the fields' types are those of the table


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return read_json_object(file)
    except ValueError as error:
        raise StartupError(str(error)) from error


def _overrides(text: str) -> dict[str, float]:
    flag = "--override-generation-config"
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{flag} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise StartupError(f'{flag} must be a JSON object, as {{"temperature": 0.6}}')
    if unknown := sorted(content.keys() - KEYS.keys()):
        raise StartupError(f"{flag} has unknown keys: {', '.join(unknown)}; known are {', '.join(KEYS)}")
    return _values(content, flag, "correct it")


def _values(content: dict[str, Any], source: str, remedy: str) -> dict[str, float]:
    """Returns the values by parameter; null means unset."""
    values: dict[str, float] = {}
    for key, name in KEYS.items():
        value, parameter = content.get(key), BY_NAME[name]
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        try:
            if not is_number or (parameter.type is int and value != int(value)):
                raise InvalidRequest(f"{key} is {value!r}; it must be {parameter.allowed}")
            check_value(key, value, parameter)
        except (InvalidRequest, OverflowError) as error:
            raise StartupError(f"{source}: {error}; {remedy}") from error
        values[name] = parameter.type(value)
    return values
