"""Spellings of fields as flags and variables, and suggestions for misspelt names."""

import dataclasses
import difflib
import typing
from collections.abc import Iterable
from typing import Any

ENVIRONMENT_PREFIX = "PAGEWIRE_"
# The similarity from which a name is suggested; below, the hint would mislead.
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
    """Returns the type without None: `int` for `int | None`; `tuple[int, ...]` stays."""
    if typing.get_origin(field.type) is tuple:
        return field.type
    types = [t for t in typing.get_args(field.type) if t is not type(None)]
    return types[0] if types else field.type


def is_list(field: dataclasses.Field[Any]) -> bool:
    """Returns whether a field is a list of numbers."""
    return typing.get_origin(base_type(field)) is tuple
