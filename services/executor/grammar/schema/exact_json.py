"""Reads JSON with all digits of its numbers, and writes values."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NoReturn

from pagewire.services.executor.grammar.schema.errors import SchemaError

MAX_DIGITS = 400  # of a number that a schema compares with; no double has an integer part of more than 309
_SHORT = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_ESCAPED = re.compile(r'["\\\x00-\x1f\x7f]')


@dataclass(frozen=True)
class TooLong:
    """A number that has too many digits, before or after its point: an error where its value matters."""

    num_digits: int

    def __str__(self) -> str:
        return f"a number of {self.num_digits} digits"


def parse(text: str, name: str) -> Any:
    """Returns the value: integers as int, other numbers as Decimal, both as TooLong beyond MAX_DIGITS.

    Raises SchemaError, which begins with `name`, unless the text is JSON.
    """

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not a number")

    try:
        return json.loads(text, parse_int=_integer, parse_float=_decimal, parse_constant=refuse)
    except RecursionError as error:
        raise SchemaError("", f"{name} is nested too deeply") from error
    except ValueError as error:
        raise SchemaError("", f"{name} is not JSON: {error}") from error


def _integer(text: str) -> int | TooLong:
    num_digits = len(text.lstrip("-"))
    return int(text) if num_digits <= MAX_DIGITS else TooLong(num_digits)


def _decimal(text: str) -> Decimal | TooLong:
    mantissa, _, exponent = text.lower().partition("e")
    num_digits = sum(map(str.isdigit, mantissa))
    if len(exponent) <= 4:
        num_digits = max(num_digits, abs(int(exponent or 0)))
    else:
        num_digits = int(exponent.lstrip("+-")) if len(exponent) < 20 else 10**20
    return Decimal(text) if num_digits <= MAX_DIGITS else TooLong(num_digits)


def written(value: bool | int | Decimal | str | None) -> str:
    """Returns a scalar as JSON. Each text has one spelling, so that texts differ exactly if their spellings do."""
    if isinstance(value, str):
        return f'"{_ESCAPED.sub(_escape, value)}"'
    if isinstance(value, Decimal):
        return str(value)
    return json.dumps(value)


def _escape(found: re.Match[str]) -> str:
    char = found[0]
    return _SHORT.get(char) or f"\\u{ord(char):04x}"
