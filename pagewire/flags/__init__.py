"""Command-line flags, YAML file, environment and profile of a configuration dataclass, all derived from its fields.

Precedence: flag, then environment (`PAGEWIRE_MAX_NUM_SEQS`), then the file given by `--config`, then `--profile`, then
the default. `pagewire.config.vllm_flags` has answers to flags of vLLM that Pagewire lacks. An error ends the process
with exit code 2 and names the source, the value and what was expected."""

import dataclasses
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pagewire.config import ServeConfig, ServiceConfig, vllm_flags
from pagewire.config.profiles import PROFILES
from pagewire.errors import StartupError
from pagewire.files.wheel_models import WHEEL_MODELS
from pagewire.flags import command_line, help, ports, refusals, shown
from pagewire.flags.answers import Answers
from pagewire.flags.given import Given
from pagewire.flags.names import ENVIRONMENT_PREFIX, environment_name, fields_of, flag_name, nearest
from pagewire.flags.sources import from_environment, from_file, text_of
from pagewire.flags.values import UsageError, convert, parse_size

__all__ = [
    "ENVIRONMENT_PREFIX",
    "UsageError",
    "environment_name",
    "flag_name",
    "is_of_vllm",
    "nearest",
    "of_keywords",
    "parse",
    "parse_size",
    "secrets",
    "to_argv",
    "without_configuration",
]

Config = TypeVar("Config")
_Fields = Mapping[str, dataclasses.Field[Any]]
_SEVERAL_WORDS = ("served_model_name", "api_key")


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
    """Returns the configuration from all sources.

    positional: fields that may also be given without their flags, in this order. without: fields that have no flag.
    flags_only: ignores the environment, the file and flags of vLLM. Exits with 0 after --help and --show-config, and
    with 2 after an error.
    """
    fields = {f.name: f for f in fields_of(config_class) if f.name not in set(without)}
    positionals = [positional] if isinstance(positional, str) else positional
    try:
        given, shows = _given(fields, argv, positionals, environ, flags_only)
        answers = Answers(fields)
        settled = _settled(answers, given, fields)
        values = _values(settled, fields)
        if "models" in values and "model" not in values:
            values["model"] = ""  # those of the file alone
    except command_line.HelpWanted as wanted:
        topic = str(wanted.args[0]) if wanted.args else ""
        print(help.text(fields, prog, description, positionals, flags_only=flags_only, topic=topic), end="")
        sys.exit(0)
    except UsageError as error:
        _exit(prog, error)
    config, moved = _with_ports(config_class(**values), settled, fields)
    for line in (*answers.lines, *moved):
        print(f"{prog}: {line}", file=sys.stderr)
    if shows is not None:
        _check(config, prog)
        try:
            print(shown.text(config, settled, list(fields), shows))
        except StartupError as error:
            _exit(prog, error)
        sys.exit(0)
    return config


def _with_ports(config: Any, settled: Mapping[str, Given], fields: _Fields) -> tuple[Any, list[str]]:
    """Returns the configuration with ports that differ, and a line for each that moved."""
    is_stack = isinstance(config, ServeConfig) and "grpc_port" in fields
    return ports.settled(config, settled) if is_stack else (config, [])


def _check(config: Any, prog: str) -> None:
    """Exits with an error for a configuration that would be refused: --show-config must not show it as valid."""
    try:
        if isinstance(config, ServiceConfig):
            refusals.check(config)
    except StartupError as error:
        _exit(prog, error)


def _exit(prog: str, error: Exception) -> NoReturn:
    print(f"{prog}: error: {error}\nsee `{prog} --help`", file=sys.stderr)
    sys.exit(2)


def _given(
    fields: _Fields, argv: Sequence[str], positionals: Sequence[str], environ: Mapping[str, str], flags_only: bool
) -> tuple[list[Given], str | None]:
    """Returns the settings of all sources, the strongest last, and the format of --show-config, if it was given."""
    several = set(positionals) <= {"model"}  # other commands have positional arguments that may follow a flag
    line, words = command_line.read(argv, command_line.options_of(fields, flags_only=flags_only, several=several))
    if flags_only:
        return line + _positional(line, words, positionals), None
    own = {given.name: given for given in line if given.name in ("config", "show_config")}
    path = own["config"].text if "config" in own else environ.get(ENVIRONMENT_PREFIX + "CONFIG")
    given = (from_file(fields, Path(str(path))) if path else []) + from_environment(fields, environ)
    line = [setting for setting in line if setting.name not in own]
    placed = _positional(line, words, positionals, several="other_models" in fields)
    if "model" in positionals and not any(setting.name == "model" for setting in given + line + placed):
        _check_names(line)
    return given + line + placed, shown.format_of(own.get("show_config"))


def _positional(
    line: Sequence[Given], words: Sequence[str], positionals: Sequence[str], *, several: bool = False
) -> list[Given]:
    """Returns the settings of words without a flag. several: models may follow the first one. Raises UsageError."""
    named = {setting.name for setting in line}
    if several and len(words) > 1 and list(positionals) == ["model"]:
        if comma := next((word for word in words if "," in word), None):
            raise UsageError(f"MODEL {comma!r:.200}: several models are words, without commas: MODEL MODEL")
        words, positionals = [words[0], ",".join(words[1:])], ("model", "other_models")
    for name in positionals[: len(words)]:
        if name in named:
            raise UsageError(f"{name.upper()} and {flag_name(name)} are the same: give one of them")
    if len(words) > len(positionals):
        raise UsageError(f"unexpected argument {words[len(positionals)]!r}")
    return [Given(name, word, name.upper(), "flag") for name, word in zip(positionals, words, strict=False)]


def _check_names(line: Sequence[Given]) -> None:
    """Checks flags that take several words: in `--served-model-name a b` without MODEL, `b` may be meant as the
    model."""
    for setting in line:
        for word in str(setting.text).split(",")[1:] if setting.name in _SEVERAL_WORDS else ():
            if "/" in word or word.endswith(".gguf") or word in WHEEL_MODELS or (word and Path(word).exists()):
                what = "the last word a key" if setting.name == "api_key" else f"{word!r} a name"
                raise UsageError(f"{setting.source}: is {what} or the MODEL? Put MODEL first, or give it with --model")


def _settled(answers: Answers, given: Iterable[Given], fields: _Fields) -> dict[str, Given]:
    """Returns settings by field, with those of a profile. Raises UsageError."""
    settled = answers.settle(given)
    settled = _of_profile(settled, fields) | settled
    settled.pop("profile", None)
    return settled


def _values(settled: Mapping[str, Given], fields: _Fields) -> dict[str, Any]:
    """Returns values by field. Raises UsageError."""
    return {name: convert(fields[name], given.text, given.source) for name, given in settled.items()}


def _of_profile(settled: Mapping[str, Given], fields: _Fields) -> dict[str, Given]:
    """Returns the settings of the profile for these fields. Raises UsageError for an unknown profile."""
    if (chosen := settled.get("profile")) is None:
        return {}
    device = settled.get("device")
    profile = PROFILES.get(str(chosen.text))
    if profile is None:
        raise UsageError(f"{chosen.source}: expected one of {', '.join(PROFILES)}, got {chosen.text!r}")
    # Services that do not compute do not know the device.
    values = (
        profile.values("auto" if device is None else str(device.text)) if "device" in fields else profile.everywhere
    )
    return {
        name: Given(name, text, f"profile {profile.name}", "profile") for name, text in values.items() if name in fields
    }


def of_keywords(fields: _Fields, keywords: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns values of fields from keyword arguments named like flags, and lines that report on flags of vLLM.

    None means the default. Raises UsageError for a bad value, and KeyError for a name that is neither a field nor
    `is_of_vllm`.
    """
    answers = Answers(fields)
    given = [
        Given(name, text_of(value), flag_name(name), "keyword") for name, value in keywords.items() if value is not None
    ]
    return _values(_settled(answers, given, fields), fields), answers.lines


def is_of_vllm(name: str) -> bool:
    """Returns whether a name is that of a flag of vLLM with an answer, or "profile"."""
    return name == "profile" or name.replace("_", "-") in vllm_flags.FLAGS


def to_argv(config: Any) -> list[str]:
    """Returns the flags from which `parse` makes this configuration again, without secrets."""
    argv = []
    for field in fields_of(type(config)):
        value = getattr(config, field.name)
        # Beside a file of models, the first one is none unless it is named.
        default = "" if field.name == "model" and getattr(config, "models", None) is not None else field.default
        if value == default or field.metadata["secret"]:
            continue
        if isinstance(value, bool):
            argv.append(flag_name(field.name) if value else "--no-" + flag_name(field.name)[2:])
        else:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else value
            argv.append(f"{flag_name(field.name)}={text}")
    return argv


def secrets(config: Any) -> dict[str, str]:
    """Returns the environment variables that complete `to_argv`: the secrets."""
    return {
        environment_name(field.name): value
        for field in fields_of(type(config))
        if field.metadata["secret"] and (value := getattr(config, field.name)) is not None
    }


def without_configuration(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment for a child that gets its whole configuration from `to_argv` and `secrets`."""
    names = {environment_name(field.name) for field in fields_of(ServeConfig)}
    names |= {ENVIRONMENT_PREFIX + "CONFIG", ENVIRONMENT_PREFIX + "PROFILE"}
    return {name: value for name, value in environ.items() if name not in names}
