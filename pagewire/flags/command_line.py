"""Reads command lines in every spelling that users write: `--flag value`, `--flag=value`, `--some_flag`, `--no-flag`,
`--flag True`, `--names a b`, `-tp 2`, `-O3`, `--object.key value`."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagewire.config import vllm_flags
from pagewire.flags.given import Given
from pagewire.flags.names import base_type, did_you_mean, flag_name, is_list
from pagewire.flags.values import UsageError

_NUMBERS = re.compile(r"[\d,]+")
_NEGATIVE = re.compile(r"-\.?\d.*")


class HelpWanted(Exception):
    """Raised for `--help`. args: the topic, or nothing."""


@dataclass(frozen=True)
class Option:
    """A flag, and the number of following words that belong to it."""

    name: str  # with underscores
    takes: str = "value"  # or switch (at most one of `optional`), words (one or more), numbers (the same)
    optional: tuple[str, ...] = ("true", "false")


def options_of(
    fields: Mapping[str, dataclasses.Field[Any]], *, flags_only: bool, several: bool = True
) -> dict[str, Option]:
    """Returns options by spelling: those of the fields and, unless flags_only, of flags of vLLM that have an answer.

    several: a field that takes several words takes all that follow.
    """
    options: dict[str, Option] = {}
    if not flags_only:
        for entry in vllm_flags.FLAGS.values():
            option = Option(entry.name.replace("-", "_"), entry.takes)
            options |= dict.fromkeys((f"--{entry.name}", *entry.short), option)
        options |= {"--config": Option("config"), "--profile": Option("profile")}
        options["--show-config"] = Option("show_config", "switch", ("text", "json"))
    for field in fields.values():
        takes = "switch" if base_type(field) is bool else "numbers" if is_list(field) else field.metadata["takes"]
        takes = takes if several or takes != "words" else "value"
        option = Option(field.name, takes)
        options[flag_name(field.name)] = option
        options |= {f"-{short}": option for short in field.metadata["short"]}
    return options


def read(argv: Sequence[str], options: Mapping[str, Option]) -> tuple[list[Given], list[str]]:
    """Returns the settings of flags, and the words that belong to no flag. Raises UsageError and HelpWanted."""
    given, words = [], []
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            words += rest
            break
        if not _is_flag(argument):
            words.append(argument)
            continue
        given.append(_read_flag(argument, rest, options))
    return given, words


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and not _NEGATIVE.fullmatch(word)


def _read_flag(argument: str, rest: list[str], options: Mapping[str, Option]) -> Given:
    """Reads one flag, and removes the words that belong to it from `rest`."""
    spelling, equals, value = argument.partition("=")
    if spelling in ("--help", "-h"):
        raise HelpWanted(*([value] if equals else rest[:1]))
    name, *path = spelling.split(".")
    if name.startswith("--"):
        name = name.replace("_", "-")
    option = options.get(name)
    if option is None and name.startswith("--no-") and not equals:
        switch = options.get("--" + name[5:])
        if switch is not None and switch.takes == "switch":
            return Given(switch.name, False, spelling, "flag")
    if option is None and spelling[1] != "-" and (option := options.get(spelling[:2])) is not None:
        equals, value = "=", spelling[2:]  # -O3
    if option is None:
        raise UsageError(f"unknown flag {spelling}" + did_you_mean(name, options))
    text: str | bool = value if equals else _following(option, spelling, rest)
    return Given(option.name, text, spelling, "flag", tuple(path))


def _following(option: Option, spelling: str, rest: list[str]) -> str | bool:
    if option.takes == "switch":
        return rest.pop(0) if rest and rest[0].lower() in option.optional else True
    if not rest or _is_flag(rest[0]):
        raise UsageError(f"{spelling}: expected a value")
    words = [rest.pop(0)]
    while option.takes in ("words", "numbers") and rest and not _is_flag(rest[0]):
        if option.takes == "numbers" and not _NUMBERS.fullmatch(rest[0]):
            break
        words.append(rest.pop(0))
    return ",".join(words)
