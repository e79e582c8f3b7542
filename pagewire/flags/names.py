"""How fields of configurations are spelled as flags and variables, and what a misspelt name may have meant."""

import dataclasses
import difflib
import typing
from collections.abc import Iterable
from typing import Any

ENVIRONMENT_PREFIX = "PAGEWIRE_"
# What `--flag` and `PAGEWIRE_FLAG` have to share with a name before that is suggested: less, and the hint misleads.
_NEAR = 0.8


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def environment_name(field_name: str) -> str:
    return ENVIRONMENT_PREFIX + field_name.upper()


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    matches = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def did_you_mean(name: str, names: Iterable[str]) -> str:
    match = nearest(name, names, _NEAR)
    return f"; did you mean {match}?" if match else ""


def fields_of(config_class: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(config_class)


def base_type(field: dataclasses.Field[Any]) -> Any:
    """`int` of `int | None`; `tuple[int, ...]` stays one."""
    if typing.get_origin(field.type) is tuple:
        return field.type
    types = [t for t in typing.get_args(field.type) if t is not type(None)]
    return types[0] if types else field.type


def is_list(field: dataclasses.Field[Any]) -> bool:
    """Whether it is a list of numbers."""
    return typing.get_origin(base_type(field)) is tuple
