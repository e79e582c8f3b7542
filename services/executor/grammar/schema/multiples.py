"""Numbers of a range that are multiples of another, in llguidance's Lark."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

from pagewire.services.executor.grammar.schema.errors import SchemaError
from pagewire.services.executor.grammar.schema.numbers import Number, common_multiple, expression

_MAX_LISTED = 1000  # multiples that are listed one by one
_MAX_TAIL = 4  # digits at the end of a number that decide whether it is a multiple
_MAX_PLACES = 20  # after the point
# llguidance counts modulo numbers of 32 bits, within bounds that are doubles.
_MAX_DIVISOR = 2**32 - 1
_MAX_COUNTED = 10**15 - 1


def multiples(number: Number) -> str | dict[str, Any]:
    """Returns a terminal's expression for these multiples, or a schema that llguidance keeps to. The range has some.

    Raises SchemaError.
    """
    multiple = number.multiple_of
    assert multiple is not None
    if number.integer or multiple.denominator == 1:
        multiple = common_multiple(multiple, Fraction(1))
        number = replace(number, integer=True)
    assert multiple is not None
    num_places = _places(multiple)
    found = None if num_places is None else _by_tails(multiple, num_places)
    if found is not None:
        return f"/{expression(replace(number, multiple_of=None))}/ & /{found}/"
    if (listed := _listed(number, multiple)) is not None:
        return listed
    if multiple.denominator == 1 and multiple.numerator <= _MAX_DIVISOR:
        low, high = number.integers()
        low, high = max(low, -_MAX_COUNTED), min(high, _MAX_COUNTED)
        if low <= high:
            return {"type": "integer", "multipleOf": multiple.numerator, "minimum": low, "maximum": high}
    raise SchemaError("", "multiples of this number cannot be guaranteed; take another, or closer bounds")


def _places(multiple: Fraction) -> int | None:
    """Returns how many digits after the point multiples have at most; None if they have too many."""
    places = (places for places in range(_MAX_PLACES + 1) if (multiple * 10**places).denominator == 1)
    return next(places, None)


def _by_tails(multiple: Fraction, num_places: int) -> str | None:
    """Returns an expression by the last digits; None if too many of them matter."""
    ways = []
    for places in range(num_places + 1):
        step = common_multiple(multiple, Fraction(1, 10**places))
        assert step is not None
        divisor = int(step * 10**places)
        tail = next((length for length in range(_MAX_TAIL + 1) if 10**length % divisor == 0), None)
        if tail is None:
            return None
        ways.append(_with_places(divisor, places, tail))
    return f"-?(?:{'|'.join(ways)})"


def _with_places(divisor: int, places: int, tail: int) -> str:
    """Numbers with so many digits after the point, of which the last ones, `tail` in number, decide."""
    tails = [f"{value:0{tail}}" if tail else "" for value in range(0, 10**tail, divisor)]
    if tail <= places:
        end = f"[0-9]{{{places - tail}}}(?:{'|'.join(tails)})"
        return rf"[0-9]+\.{end}" if places else "[0-9]+"
    wholes = [(text[: tail - places], text[tail - places :]) for text in tails]
    point = r"\." if places else ""
    return "|".join(f"(?:[0-9]*{whole}|{int(whole)}){point}{part}" for whole, part in wholes)


def _listed(number: Number, multiple: Fraction) -> str | None:
    if number.low is None or number.high is None:
        return None
    first, last = math.ceil(number.low.value / multiple), math.floor(number.high.value / multiple)
    places = _places(multiple)
    if last - first > _MAX_LISTED or places is None:
        return None
    values = [value for count in range(first, last + 1) if number.admits(value := count * multiple)]
    return " | ".join(json.dumps(_decimal(value, places)) for value in values)


def _decimal(value: Fraction, places: int) -> str:
    whole, part = divmod(abs(int(value * 10**places)), 10**places)
    text = f"{whole}.{part:0{places}}" if places else str(whole)
    return f"-{text}" if value < 0 else text
