"""The values of sampling parameters that a request does not name. Only this module knows the order of their sources.

The strongest first: the request itself, `--override-generation-config`, the model's files (generation_config.json, else
the metadata of a GGUF file), its authors' advice, OpenAI's defaults (`PARAMETERS`).
"""

import json
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagewire.config import TokenizerConfig
from pagewire.config.sampling_checks import check_value
from pagewire.config.sampling_params import BY_NAME
from pagewire.errors import InvalidRequest, StartupError
from pagewire.files.gguf import read_header
from pagewire.files.json_file import read_json_object
from pagewire.files.sampling_defaults.advice import advice_for

GENERATION_CONFIG = "generation_config.json"
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# The keys of generation_config.json that are read, as vLLM reads them, and the parameters of which they are defaults.
# max_new_tokens is also the limit of requests that ask for more (`sampling_params` of text_requests.py).
KEYS = {name: name for name in _SAMPLING} | {"max_new_tokens": "max_tokens"}
_OVERRIDABLE = KEYS | {name: name for name in ("presence_penalty", "frequency_penalty")}
# The keys of a GGUF file that llama.cpp's converter writes from the same file.
_GGUF_PREFIX = "general.sampling."
_GGUF_KEYS = {
    f"{_GGUF_PREFIX}temp": "temperature",
    f"{_GGUF_PREFIX}top_k": "top_k",
    f"{_GGUF_PREFIX}top_p": "top_p",
    f"{_GGUF_PREFIX}min_p": "min_p",
    f"{_GGUF_PREFIX}penalty_repeat": "repetition_penalty",
}
_GGUF_NAMES = ("general.name", "general.basename", "general.base_model.0.name")
_OVERRIDE = "--override-generation-config"
_REMEDY = "correct it, or start with --generation-config vllm"


@dataclass(frozen=True)
class SamplingDefaults:
    """Defaults of sampling parameters; those that are missing are OpenAI's.

    source: where they come from, in words; "" if no source names any. ignored: keys of the file without a counterpart.
    unless_greedy: the names of those that a request for the most probable tokens does not get.
    """

    values: Mapping[str, float] = field(default_factory=dict)
    source: str = ""
    ignored: tuple[str, ...] = ()
    unless_greedy: frozenset[str] = frozenset()

    def __str__(self) -> str:
        listed = (
            f"{name} {value:g}" + (", the most of any request" if name == "max_tokens" else "")
            for name, value in self.values.items()
        )
        return ", ".join(listed) or "OpenAI's (temperature 1)"


def sampling_defaults(config: TokenizerConfig, path: Path | None) -> SamplingDefaults:
    """Returns the defaults of requests. path: directory or file of the model; None: not on this machine. Raises
    StartupError, which names the flag or the file that is wrong."""
    source = config.generation_config
    if source == "auto":
        chosen = defaults_of_model(config.model, path)
    elif source == "vllm":
        chosen = SamplingDefaults(source="--generation-config vllm")
    else:
        chosen = SamplingDefaults(_of_json(_named_file(source)), f"--generation-config {source}")
    if config.override_generation_config is None:
        return chosen
    overrides = _overrides(config.override_generation_config)
    return SamplingDefaults(
        {**chosen.values, **overrides},
        " and ".join(filter(None, (_OVERRIDE, chosen.source))),
        chosen.ignored,
        chosen.unless_greedy - overrides.keys(),
    )


def defaults_of_model(model: str, path: Path | None) -> SamplingDefaults:
    """Returns the defaults in the model's files, and its authors' advice if the files name no sampling at all: half of
    each would be a mixture that no author advised. Raises StartupError."""
    values: dict[str, float] = {}
    if path is not None and path.is_dir() and (path / GENERATION_CONFIG).is_file():
        values = _of_json(path / GENERATION_CONFIG)
        if values.keys() & set(_SAMPLING):
            return SamplingDefaults(values, GENERATION_CONFIG)
    metadata = _metadata(path)
    keys = {key for key in metadata if key.startswith(_GGUF_PREFIX)}
    if of_file := _values(metadata, _GGUF_KEYS, str(path)):
        ignored = tuple(sorted(keys - _GGUF_KEYS.keys()))
        return SamplingDefaults(values | of_file, f"{_GGUF_PREFIX}* of the GGUF file", ignored)
    if advice := advice_for(_names(model, path, metadata)):
        source = f"the authors of {advice.family}, {advice.source}"
        if advice.added:
            source += f" ({', '.join(advice.added)}: Pagewire's)"
        values |= advice.values | advice.added
        return SamplingDefaults(values, source, unless_greedy=frozenset(advice.added))
    return SamplingDefaults(values, GENERATION_CONFIG if values else "")


def _names(model: str, path: Path | None, metadata: Mapping[str, Any]) -> Iterator[str]:
    """Yields the names of the model, the most telling first."""
    given = Path(model).expanduser()
    yield given.resolve().name if given.is_dir() else given.name if given.exists() else model
    if path is not None:
        yield path.name
        yield from (part for part in path.parts if part.startswith("models--"))  # the hub's cache
        yield from _name_in_config(path)
    yield from (name for key in _GGUF_NAMES if isinstance(name := metadata.get(key), str))


def _name_in_config(path: Path) -> Iterator[str]:
    file = path / "config.json"
    if path.is_dir() and file.is_file():
        name = _read_json(file).get("_name_or_path")
        if isinstance(name, str):
            yield name


def _metadata(path: Path | None) -> dict[str, Any]:
    """Returns the metadata of the model's GGUF file; nothing if it has none. Raises StartupError."""
    if path is not None and path.is_dir():
        files = [] if (path / "config.json").is_file() else sorted(path.glob("*.gguf"))
        path = files[0] if len(files) == 1 else None
    if path is None or path.suffix != ".gguf":
        return {}
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return read_header(data, skip_string_arrays=True).metadata
    except (OSError, ValueError) as error:  # ValueError: an empty file, and GgufError
        raise StartupError(f"{path}: {error}") from error


def _named_file(source: str) -> Path:
    path = Path(source).expanduser()
    file = path / GENERATION_CONFIG if path.is_dir() else path
    if not file.is_file():
        raise StartupError(
            f"--generation-config {source}: there is no such file, and no directory with {GENERATION_CONFIG}"
        )
    return file


def _of_json(file: Path) -> dict[str, float]:
    return _values(_read_json(file), KEYS, str(file))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return read_json_object(file)
    except ValueError as error:
        raise StartupError(str(error)) from error


def _overrides(text: str) -> dict[str, float]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{_OVERRIDE} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise StartupError(f'{_OVERRIDE} must be a JSON object, as {{"temperature": 0.6}}')
    if unknown := sorted(content.keys() - _OVERRIDABLE.keys()):
        raise StartupError(f"{_OVERRIDE} has unknown keys: {', '.join(unknown)}; known are {', '.join(_OVERRIDABLE)}")
    return _values(content, _OVERRIDABLE, _OVERRIDE, "correct it")


def _values(
    content: Mapping[str, Any], keys: Mapping[str, str], source: str, remedy: str = _REMEDY
) -> dict[str, float]:
    """Returns the values by parameter; null means unset."""
    values: dict[str, float] = {}
    for key, name in keys.items():
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
