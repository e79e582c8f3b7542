"""Values of keywords, and what they say of numbers and strings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

from pagewire.services.executor.grammar.schema.errors import step, wrong
from pagewire.services.executor.grammar.schema.exact_json import TooLong
from pagewire.services.executor.grammar.schema.numbers import Bound, Number
from pagewire.services.executor.grammar.schema.shapes import NOTHING, Array, Clause, Object, String, Union, literal
from pagewire.services.executor.grammar.schema.texts import FORMATS, why_refused

_MAX_DEPTH = 100
_MOST_COUNTED = 2**31 - 1  # characters, items or properties


def check_kinds(schema: Mapping[str, Any], place: str) -> None:
    """Checks the values of keywords that are read only beside others. Raises SchemaError."""
    for key in ("minContains", "maxContains"):
        count_at(schema, key, place)
    for key in ("if", "then", "else", "additionalItems"):
        if not isinstance(schema.get(key, True), dict | bool):
            wrong(step(place, key), "a schema must be an object, true or false")
    for key in ("$defs", "definitions"):
        mapping_at(schema.get(key, {}), step(place, key))
    if not isinstance(schema.get("prefixItems", []), list):
        wrong(step(place, "prefixItems"), "must be a list of schemas")


def check_depth(depth: int, place: str) -> None:
    if depth > _MAX_DEPTH:
        wrong(place, f"the schema is nested more than {_MAX_DEPTH} levels deep")


def constant(value: Any, place: str, depth: int = 0) -> Union:
    """Returns the shape of one value."""
    check_depth(depth, place)
    if isinstance(value, TooLong):
        wrong(place, f"{value} cannot be written")
    if isinstance(value, list):
        items = tuple(constant(item, step(place, index), depth + 1) for index, item in enumerate(value))
        return (Array(items, NOTHING, len(items), len(items)),)
    if isinstance(value, dict):
        properties = tuple((name, constant(item, step(place, name), depth + 1)) for name, item in value.items())
        for name in value:
            _check_text(name, place)
        return (Object((Clause(properties, (), NOTHING, True),), required=tuple(value)),)
    if isinstance(value, str):
        _check_text(value, place)
    return (literal(value),)


def numbers_of(schema: Mapping[str, Any], place: str) -> Union:
    """Returns the numbers that a schema allows."""
    low = _bound(schema, "minimum", "exclusiveMinimum", place)
    high = _bound(schema, "maximum", "exclusiveMaximum", place)
    if high is not None:
        high = Bound(-high.value, high.is_exclusive)
    multiple = None
    if "multipleOf" in schema:
        where = step(place, "multipleOf")
        multiple = abs(_number(schema["multipleOf"], where, as_double=False))
        if not multiple:
            wrong(where, "must be greater than 0")
    number = Number(low=low, high=high, multiple_of=multiple)
    return () if number.is_empty() else (number,)


def _bound(schema: Mapping[str, Any], key: str, exclusive_key: str, place: str) -> Bound | None:
    """Returns the stricter of two bounds; upper bounds with the other sign, so that the greater is stricter."""
    sign = -1 if key == "maximum" else 1
    bounds = []
    is_exclusive = schema.get(exclusive_key)  # in draft 4, whether the other one is
    if key in schema:
        bounds.append(Bound(sign * _number(schema[key], step(place, key)), is_exclusive is True))
    if exclusive_key in schema and not isinstance(is_exclusive, bool):
        bounds.append(Bound(sign * _number(is_exclusive, step(place, exclusive_key)), True))
    return max(bounds, key=lambda bound: (bound.value, bound.is_exclusive), default=None)


def _number(value: Any, place: str, *, as_double: bool = True) -> Fraction:
    """as_double: a number that is not an integer is the double that clients read."""
    if isinstance(value, TooLong):
        wrong(place, f"{value} is too long")
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        wrong(place, "must be a number")
    if isinstance(value, Decimal) and as_double:
        double = float(value)
        return Fraction(double) if abs(double) < float("inf") else Fraction(value)
    return Fraction(value)


def strings_of(schema: Mapping[str, Any], place: str) -> Union:
    """Returns the strings that a schema allows."""
    least, most = (count_at(schema, key, place) for key in ("minLength", "maxLength"))
    patterns: tuple[str, ...] = ()
    if "pattern" in schema:
        check_pattern(schema["pattern"], step(place, "pattern"))
        patterns = (schema["pattern"],)
    name = schema.get("format", "")
    if not isinstance(name, str):
        wrong(step(place, "format"), "must be a text")
    if most is not None and (least or 0) > most:
        return NOTHING
    return (String(least or 0, most, patterns, (name,) if name in FORMATS else ()),)


def check_pattern(pattern: Any, place: str) -> None:
    """Raises SchemaError unless llguidance can follow a regular expression."""
    if not isinstance(pattern, str):
        wrong(place, "must be a regular expression, as text")
    _check_text(pattern, place)
    if error := why_refused(json.dumps({"type": "string", "pattern": pattern})):
        wrong(place, error)


def _check_text(text: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        wrong(place, "the text has half of a surrogate pair, which is no Unicode")


def count_at(schema: Mapping[str, Any], key: str, place: str) -> int | None:
    """Returns the limit that a keyword states; None if it is not there."""
    if key not in schema:
        return None
    value, where = schema[key], step(place, key)
    if isinstance(value, TooLong):
        wrong(where, f"{value} is too long")
    if isinstance(value, bool) or not isinstance(value, int | Decimal) or value < 0:
        wrong(where, "must be an integer that is not negative")
    if value > _MOST_COUNTED:
        wrong(where, f"must be at most {_MOST_COUNTED}")
    if value != int(value):
        wrong(where, "must be an integer that is not negative")
    return int(value)


def mapping_at(value: Any, place: str) -> Mapping[str, Any]:
    """Returns the value, which must be an object."""
    if not isinstance(value, dict):
        wrong(place, "must be an object")
    for name in value:
        _check_text(name, place)
    return value


def names_at(value: Any, place: str) -> tuple[str, ...]:
    """Returns the value, which must be a list of names, each once."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        wrong(place, "must be a list of names")
    for name in value:
        _check_text(name, place)
    return tuple(dict.fromkeys(value))
