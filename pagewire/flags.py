"""Command-line flags, YAML file and environment of a configuration dataclass, all derived from its fields.

Precedence: flag, then environment (`PAGEWIRE_MAX_NUM_SEQS`), then the file given by `--config`, then the default.
Whatever is wrong ends the process with exit code 2, naming the source, the value and what was expected.
"""

import argparse
import dataclasses
import difflib
import os
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pagewire.config import ServeConfig

Config = TypeVar("Config")

ENVIRONMENT_PREFIX = "PAGEWIRE_"
_GROUPS = (
    "batch",
    "generation",
    "model",
    "images",
    "network",
    "scheduling",
    "memory",
    "executor",
    "speculation",
    "tokenizer",
    "storage",
    "recovery",
    "observability",
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kmgt])|([KMGT])(?:iB?)?)?")
_TRUE = {"true", "1", "yes", "on"}
_FALSE = {"false", "0", "no", "off"}


class UsageError(Exception):
    """A flag, variable or key that is unknown or has a bad value."""


def parse(
    config_class: type[Config],
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    positional: str | Sequence[str] = (),
    without: Iterable[str] = (),
    flags_only: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> Config:
    """The configuration from all sources.

    positional: the fields that may also be given without their flags, in this order. without: fields that are not
    offered. flags_only: neither environment nor file. Exits with 0 after --help and with 2 after an error.
    """
    fields = {f.name: f for f in _fields(config_class) if f.name not in set(without)}
    positionals = [positional] if isinstance(positional, str) else positional
    parser = _parser(fields, prog, description, positionals, flags_only)
    try:
        given = _given(parser, argv, positionals)
        values: dict[str, Any] = {}
        if not flags_only:
            if path := given.pop("config", None) or environ.get(ENVIRONMENT_PREFIX + "CONFIG"):
                values |= _from_file(fields, Path(str(path)))
            values |= _from_environment(fields, environ)
        values |= {name: _convert(fields[name], text, flag_name(name)) for name, text in given.items()}
    except UsageError as error:
        parser.error(str(error))
    return config_class(**values)


def to_argv(config: Any) -> list[str]:
    """The flags that `parse` needs to make this configuration again, secrets excepted."""
    argv = []
    for field in _fields(type(config)):
        value = getattr(config, field.name)
        if value == field.default or field.metadata["secret"]:
            continue
        if isinstance(value, bool):
            argv.append(flag_name(field.name) if value else "--no-" + flag_name(field.name)[2:])
        else:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else value
            argv.append(f"{flag_name(field.name)}={text}")
    return argv


def secrets(config: Any) -> dict[str, str]:
    """The environment variables that complete `to_argv`."""
    return {
        environment_name(field.name): value
        for field in _fields(type(config))
        if field.metadata["secret"] and (value := getattr(config, field.name)) is not None
    }


def without_configuration(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a child that gets its whole configuration from `to_argv` and `secrets`."""
    names = {environment_name(field.name) for field in _fields(ServeConfig)} | {ENVIRONMENT_PREFIX + "CONFIG"}
    return {name: value for name, value in environ.items() if name not in names}


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def environment_name(field_name: str) -> str:
    return ENVIRONMENT_PREFIX + field_name.upper()


def parse_size(text: str) -> int:
    """ "2k" = 2000, "2K" = "2Ki" = "2KiB" = 2048, "0.5GiB" = 2**29. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not a size: {text!r}")
    number, decimal, binary = match.groups()
    unit = 1000 ** (" kmgt".index(decimal)) if decimal else 1024 ** (" KMGT".index(binary)) if binary else 1
    size = float(number) * unit if "." in number else int(number) * unit
    if size != int(size):
        raise ValueError(f"not a whole number: {text!r}")
    return int(size)


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    matches = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def _fields(config_class: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(config_class)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\nsee `{self.prog} --help`\n")


class _HelpFormatter(argparse.HelpFormatter):
    """`--[no-]flag` in one word, and each flag's help on a column wide enough for the longest name."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return "--[no-]" + action.option_strings[0][2:]
        return super()._format_action_invocation(action)


def _parser(
    fields: Mapping[str, dataclasses.Field[Any]],
    prog: str,
    description: str,
    positionals: Sequence[str],
    flags_only: bool,
) -> _Parser:
    usage = " ".join([prog, *(f"[{name.upper()}]" for name in positionals), "[flags]"])
    epilog = "Sizes take k, m, g (powers of 1000) and K, M, G or Ki, Mi, Gi, KiB, MiB, GiB (powers of 1024)."
    if not flags_only:
        epilog += (
            " Every flag is also a key of the YAML file given by --config (max-num-seqs: 64) and an environment"
            f" variable ({ENVIRONMENT_PREFIX}MAX_NUM_SEQS=64). A flag wins over the environment, the environment over"
            " the file."
        )
    parser = _Parser(
        prog=prog,
        usage=usage,
        description=description,
        epilog=epilog,
        allow_abbrev=False,
        formatter_class=_HelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    if not flags_only:
        parser.add_argument("--config", metavar="FILE", help="YAML file with any of these flags")
    groups: dict[str, list[dataclasses.Field[Any]]] = {field.metadata["group"]: [] for field in fields.values()}
    for field in fields.values():
        groups[field.metadata["group"]].append(field)
    for name in sorted(groups, key=lambda name: _GROUPS.index(name) if name in _GROUPS else -1):
        group = parser.add_argument_group(name)
        for field in groups[name]:
            _add_flag(group, field)
    return parser


def _add_flag(group: Any, field: dataclasses.Field[Any]) -> None:
    text = field.metadata["help"].replace("%", "%%")
    if field.type is bool:
        text += f" (default: {'on' if field.default else 'off'})"
        group.add_argument(flag_name(field.name), action=argparse.BooleanOptionalAction, help=text)
        return
    if field.default not in (None, "") and "default:" not in text:
        text += f" (default: {field.default})"
    choices = field.metadata["choices"]
    metavar = "{" + ",".join(choices) + "}" if choices else _metavar(field)
    names = [flag_name(field.name)] + ([f"-{field.metadata['short']}"] if field.metadata["short"] else [])
    group.add_argument(*names, metavar=metavar, help=text)


def _metavar(field: dataclasses.Field[Any]) -> str:
    if field.metadata["kind"] == "size":
        return "SIZE"
    base = _base_type(field)
    if typing.get_origin(base) is tuple:
        return "N,N,..."
    return "N" if base is int else "X" if base is float else field.name.rpartition("_")[2].upper()


def _given(parser: _Parser, argv: Sequence[str], positionals: Sequence[str]) -> dict[str, str | bool]:
    """What the command line says, as text."""
    end = argv.index("--") if "--" in argv else len(argv)
    # argparse itself loses an optional positional that follows a flag, so it does not know of ours.
    namespace, rest = parser.parse_known_args(list(argv[:end]))
    for argument in rest:
        if argument.startswith("-"):
            name = argument.partition("=")[0]
            raise UsageError(f"unknown flag {name}" + _did_you_mean(name, parser._option_string_actions))
    given = vars(namespace)
    rest += argv[end + 1 :]
    for name, value in zip(positionals, rest, strict=False):
        if name in given:
            raise UsageError(f"{name.upper()} and {flag_name(name)} are the same: give one of them")
        given[name] = value
    rest = rest[len(positionals) :]
    if rest:
        raise UsageError(f"unexpected argument {rest[0]!r}")
    return given


def _from_file(fields: Mapping[str, dataclasses.Field[Any]], path: Path) -> dict[str, Any]:
    import yaml  # only those who use a file pay for the import

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--config {path}: cannot be read as YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"--config {path}: expected keys and values such as `max-num-seqs: 64`")
    values = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in fields:
            known = [flag_name(field)[2:] for field in fields]
            raise UsageError(f"{path}: unknown key {key}" + _did_you_mean(name.replace("_", "-"), known))
        if value is not None:
            values[name] = _convert(fields[name], _yaml_text(value), f"{path}: {key}")
    return values


def _yaml_text(value: Any) -> str | bool:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return value if isinstance(value, bool) else str(value)


def _from_environment(fields: Mapping[str, dataclasses.Field[Any]], environ: Mapping[str, str]) -> dict[str, Any]:
    """Variables of fields that only other services have are left to those, variables that resemble no field to whoever
    reads them (PAGEWIRE_CACHE_DIR); misspelt ones are errors."""
    known = {field.name.upper() for field in _fields(ServeConfig)} | {name.upper() for name in fields}
    values = {}
    for variable, text in environ.items():
        # Kubernetes announces a service named "pagewire" as PAGEWIRE_PORT=tcp://10.0.0.1:8000: not meant for us.
        if not variable.startswith(ENVIRONMENT_PREFIX) or not text or text.startswith(("tcp://", "udp://")):
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX)
        if name.lower() in fields:
            values[name.lower()] = _convert(fields[name.lower()], text, variable)
        elif name not in known and (match := nearest(name, known, cutoff=0.85)):
            raise UsageError(f"unknown variable {variable}; did you mean {ENVIRONMENT_PREFIX}{match}?")
    return values


def _did_you_mean(name: str, names: Iterable[str]) -> str:
    match = nearest(name, names)
    return f"; did you mean {match}?" if match else ""


def _base_type(field: dataclasses.Field[Any]) -> Any:
    """`int` of `int | None`; `tuple[int, ...]` stays one."""
    if typing.get_origin(field.type) is tuple:
        return field.type
    types = [t for t in typing.get_args(field.type) if t is not type(None)]
    return types[0] if types else field.type


def _convert(field: dataclasses.Field[Any], text: str | bool, source: str) -> Any:
    """The field's value from its text. Raises UsageError naming source, value and expectation."""
    base, choices, valid = _base_type(field), field.metadata["choices"], field.metadata["valid"]
    if base is bool:
        lowered = str(text).lower()
        if lowered in _TRUE | _FALSE:
            return lowered in _TRUE
        raise UsageError(f"{source}: expected true or false, got {text!r}")
    text = str(text)
    if base is str:
        if choices and text not in choices:
            raise UsageError(f"{source}: expected one of {', '.join(choices)}, got {text!r}")
        if field.metadata["secret"] and (not text or text != text.strip()):
            # Empty, it would protect nothing; and HTTP drops spaces around a header's value.
            raise UsageError(f"{source}: expected a value that is not empty and has no spaces around it")
        return text
    is_list = typing.get_origin(base) is tuple
    number = typing.get_args(base)[0] if is_list else base
    kind = "size" if field.metadata["kind"] == "size" else "whole number" if number is int else "number"
    try:
        values = tuple(parse_size(item) if kind == "size" else number(item) for item in _items(text, is_list))
    except ValueError:
        values = ()
    if not values or (valid is not None and not all(value in valid for value in values)):
        expected = (f"{kind}s with commas between" if is_list else f"a {kind}") + (f" ({valid})" if valid else "")
        raise UsageError(f"{source}: expected {expected}, got {text!r}")
    return values if is_list else values[0]


def _items(text: str, is_list: bool) -> list[str]:
    return text.split(",") if is_list else [text]
