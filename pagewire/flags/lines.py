"""The models of a stack: those of the command line, the entries of the file of --models, and entries that are added
later. Each has a line of services; its flags are those of the command line, with its own in their place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pagewire.config import (
    ExecutorConfig,
    GatewayConfig,
    SchedulerConfig,
    ServeConfig,
    TokenizerConfig,
    vllm_flags,
)
from pagewire.config.ray import RayConfig
from pagewire.config.serve import SET_BY_STACK
from pagewire.config.shared import ListenConfig
from pagewire.config.values.texts import name as check_text
from pagewire.config.values.tokenizer import served_names
from pagewire.errors import StartupError
from pagewire.files.models import default_served_name
from pagewire.flags.answers import Answers
from pagewire.flags.given import Given
from pagewire.flags.names import did_you_mean, fields_of, flag_name
from pagewire.flags.sources import text_of
from pagewire.flags.values import UsageError, convert, parse_size
from pagewire.wire.model_names import not_served

_KEYS = ("name", "model", "aliases", "pinned", "memory", "idle_timeout", "flags")
_LONGEST_NAME = 255  # characters
# Flags of the command line that are about its first model alone, and what they are for the others.
_OF_FIRST: dict[str, Any] = {"grpc_port": 0} | dict.fromkeys(
    ("scheduler_grpc_port", "lora_modules", "revision", "gguf", "tokenizer", "tokenizer_revision", "chat_template")
)
_OF_STACK: dict[str, Any] = {"other_models": None, "models": None, "model_alias": None, "default_model": None}


@dataclass(frozen=True)
class LineSettings:
    """The settings of one model of a stack.

    config: the flags of its services. is_pinned: it is loaded at the start, and makes room for no other model. memory:
    bytes that it counts for; None: as measured. has_grpc: whether clients reach it at a port of its own.
    """

    config: ServeConfig
    aliases: tuple[str, ...] = ()
    is_pinned: bool = True
    memory: int | None = None
    has_grpc: bool = True

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names as its tokenizer service knows them."""
        return served_names(self.config.served_model_name or default_served_name(self.config.model))

    @property
    def name(self) -> str:
        """The first served name."""
        return self.served_names[0]

    @property
    def names(self) -> tuple[str, ...]:
        """All names that clients may give."""
        return (*self.served_names, *self.aliases)


@dataclass(frozen=True)
class StackModels:
    """All models at the start; the first one serves requests that name none. default: the name of the one that serves
    unknown names; "": none does."""

    lines: tuple[LineSettings, ...]
    default: str = ""


def line_fields() -> dict[str, dataclasses.Field[Any]]:
    """Returns the flags that a model can have for itself, by field."""
    own: dict[str, dataclasses.Field[Any]] = {}
    for service in (TokenizerConfig, SchedulerConfig, RayConfig, ExecutorConfig):
        own |= {field.name: field for field in fields_of(service)}
    shared = {field.name for one in (GatewayConfig, ListenConfig) for field in fields_of(one)} - {"cpu_bind", "seed"}
    named = {"model", "served_model_name", "idle_timeout", "public_admin", *shared, *SET_BY_STACK}
    of_stack = ("grpc_port", "scheduler_grpc_port", "prefill_executors")
    own |= {field.name: field for field in fields_of(ServeConfig) if field.name in of_stack}
    return {name: field for name, field in own.items() if name not in named}


def models_of(config: ServeConfig) -> StackModels:
    """Returns the models that a configuration names. Raises StartupError."""
    lines = _of_command_line(config)
    default = config.default_model or ""
    if config.models is not None:
        entries, of_file = _of_file(config, Path(config.models).expanduser(), is_first=not lines)
        lines, default = [*lines, *entries], default or of_file
    lines = _with_aliases(lines, config.model_alias or "")
    owners: dict[str, LineSettings] = {}
    for line in lines:
        check_names(line, owners)
        owners |= dict.fromkeys(line.names, line)
    if default and default not in owners:
        what = "--default-model" if config.default_model else f"{config.models}: default_model"
        raise StartupError(f"{what}: {not_served(default, owners)}")
    return StackModels(tuple(lines), owners[default].name if default else "")


def check_names(line: LineSettings, others: Mapping[str, LineSettings]) -> None:
    """Raises StartupError if a name of this model belongs to another one. others: by all their names."""
    for name in line.names:
        if (other := others.get(name)) is not None:
            raise StartupError(
                f"two models are named {name!r:.100}: {other.config.model} and {line.config.model}; give one of them "
                "another name (--models FILE: name, aliases; --served-model-name, --model-alias)"
            )


def line_of_entry(entry: Any, base: ServeConfig, where: str, name: str = "") -> LineSettings:
    """Returns the settings of an entry of the file of --models. Raises StartupError that begins with `where`.

    base: the flags of the stack. name: the name, if the entry has none.
    """
    try:
        return _line_of_entry(entry, base, where, name)
    except (UsageError, StartupError) as error:
        text = str(error)
        raise StartupError(text if text.startswith(where) else f"{where}: {text}") from error


def base_of(config: ServeConfig) -> ServeConfig:
    """Returns the flags of a model that is added later. config: those of the stack."""
    return replace(config, **_OF_FIRST, served_model_name=None)


def _of_command_line(config: ServeConfig) -> list[LineSettings]:
    """Returns the models of the command line, which are pinned."""
    if not config.model:
        return []
    first = replace(config, **_OF_STACK)
    first = replace(first, served_model_name=first.served_model_name or default_served_name(first.model))
    found = [LineSettings(first)]
    for model in filter(None, (part.strip() for part in (config.other_models or "").split(","))):
        of_other = replace(first, model=model, served_model_name=default_served_name(model), **_OF_FIRST)
        found.append(LineSettings(of_other, has_grpc=False))
    return found


def _of_file(config: ServeConfig, path: Path, *, is_first: bool) -> tuple[list[LineSettings], str]:
    """Returns the models of a file, and the one for unknown names. is_first: no other model comes before them."""
    from pagewire.flags import yaml_file  # deferred: importing yaml is slow, and most stacks have no file

    try:
        content, numbers = yaml_file.read_list(path, "models", "--models")
    except UsageError as error:
        raise StartupError(str(error)) from error
    if not isinstance(content, dict) or not isinstance(content.get("models"), list) or not content["models"]:
        raise StartupError(f"--models {path}: expected a list `models:` of entries such as `- model: owner/name`")
    if unknown := [key for key in content if key not in ("models", "default_model")]:
        known = did_you_mean(str(unknown[0]), ("models", "default_model"))
        raise StartupError(f"--models {path}: unknown key {unknown[0]}; expected models and default_model{known}")
    default = content.get("default_model") or ""
    if not isinstance(default, str):
        raise StartupError(f"--models {path}: default_model: expected a name, got {default!r:.100}")
    lines = []
    for index, (entry, number) in enumerate(zip(content["models"], numbers, strict=True)):
        base = replace(config, served_model_name=None) if is_first and not index else base_of(config)
        lines.append(line_of_entry(entry, base, f"{path}, line {number}"))
    if is_first:
        lines[0] = replace(lines[0], has_grpc=True)
    return lines, default


def _line_of_entry(entry: Any, base: ServeConfig, where: str, name: str) -> LineSettings:
    if not isinstance(entry, dict):
        raise UsageError("expected keys and values such as `model: owner/name`")
    entry = {str(key).replace("-", "_"): value for key, value in entry.items() if value is not None}
    for key in entry:
        if key not in _KEYS:
            is_flag = " (flags are keys of `flags:`)" if key in line_fields() else ""
            expected = f"expected {', '.join(_KEYS)}{is_flag}{did_you_mean(key, _KEYS)}"
            raise UsageError(f"unknown key {key:.100}; {expected}")
    model = entry.get("model")
    if not isinstance(model, str) or not model.strip():
        raise UsageError("model: expected a path or an id, as for `pagewire serve MODEL`")
    model = convert(next(one for one in fields_of(ServeConfig) if one.name == "model"), model, f"{where}: model")
    own = _flags_of(entry.get("flags", {}), where)
    idle_timeout = entry.get("idle_timeout", base.idle_timeout)
    if isinstance(idle_timeout, bool) or not isinstance(idle_timeout, int | float) or not 0 <= idle_timeout < 1e9:
        raise UsageError(f"idle_timeout: expected seconds, 0: never; got {idle_timeout!r:.100}")
    is_pinned = entry.get("pinned", False)
    if not isinstance(is_pinned, bool):
        raise UsageError(f"pinned: expected true or false, got {is_pinned!r:.100}")
    given_name = _name_of(entry.get("name", name or default_served_name(model)), "name")
    aliases = entry.get("aliases", [])
    aliases = [aliases] if isinstance(aliases, str) else aliases
    if not isinstance(aliases, list):
        raise UsageError(f"aliases: expected a list of names, got {aliases!r:.100}")
    config = replace(base, **_OF_STACK)
    config = replace(config, model=model, served_model_name=given_name, idle_timeout=float(idle_timeout))
    config = replace(config, **own)
    return LineSettings(
        config,
        aliases=tuple(_name_of(alias, "aliases") for alias in aliases),
        is_pinned=is_pinned,
        memory=_memory_of(entry.get("memory")),
        has_grpc="grpc_port" in own,
    )


def _name_of(name: Any, key: str) -> str:
    """Returns a name of a model. Raises UsageError."""
    try:
        if not isinstance(name, str) or not name or len(name) > _LONGEST_NAME or "," in name or name.split() != [name]:
            raise ValueError(f"a name of at most {_LONGEST_NAME} characters, without spaces and commas")
        if {".", ".."} & set(name.split("/")):
            raise ValueError("a name without parts `.` and `..`, which clients leave out of paths")
        check_text(name)
    except ValueError as error:
        raise UsageError(f"{key}: expected {error}, got {name!r:.100}") from error
    return name


def _memory_of(given: Any) -> int | None:
    if given is None:
        return None
    try:
        size = parse_size(str(given))
    except ValueError:
        size = 0
    if isinstance(given, bool) or not 0 < size < 2**63:
        raise UsageError(f"memory: expected a size such as 2GiB, got {given!r:.100}")
    return size


def _flags_of(given: Any, where: str) -> dict[str, Any]:
    """Returns the values of a model's own flags, by field. Raises UsageError."""
    if not isinstance(given, dict):
        raise UsageError(f"flags: expected keys and values such as `max-model-len: 4096`, got {given!r:.100}")
    fields, known = line_fields(), {field.name for field in fields_of(ServeConfig)}
    settings = []
    for key, value in ((str(key), value) for key, value in given.items()):
        flag = key.replace("_", "-").removeprefix("--")
        name = flag.replace("-", "_")
        if name not in fields and name in known:
            where_to = (
                f"write it as the key {name}, beside `flags:`" if name in _KEYS else "give it to `pagewire serve`"
            )
            raise UsageError(f"flags: {key:.100} is not a flag of one model; {where_to}")
        if name not in fields and flag not in vllm_flags.FLAGS:
            raise UsageError(
                f"flags: unknown key {key:.100}" + did_you_mean(flag, [flag_name(one)[2:] for one in fields])
            )
        if value is not None:
            settings.append(Given(name, text_of(value), f"{where}: {key}", "file"))
    settled = Answers(fields).settle(settings)
    return {name: convert(fields[name], one.text, one.source) for name, one in settled.items() if name in fields}


def _with_aliases(lines: Sequence[LineSettings], text: str) -> list[LineSettings]:
    """Returns the models with the names of --model-alias. Raises StartupError."""
    found = list(lines)
    for pair in filter(None, (part.strip() for part in text.split(","))):
        alias, equals, name = pair.partition("=")
        place = next((i for i, line in enumerate(found) if name.strip() in line.names), None)
        if not equals or not alias.strip() or not name.strip():
            raise StartupError(f"--model-alias: expected NAME=MODEL, got {pair!r:.200}")
        if place is None:
            raise StartupError(
                f"--model-alias {pair:.200}: {not_served(name.strip(), [n for x in found for n in x.names])}"
            )
        try:
            alias = _name_of(alias.strip(), "--model-alias")
        except UsageError as error:
            raise StartupError(str(error)) from error
        found[place] = replace(found[place], aliases=(*found[place].aliases, alias))
    return found
