"""Integers that are written as decimal numbers, which JSON does not distinguish."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pagewire.gateway.core.reading.validation import path_of

_ANY = object()  # any item of a list


def with_integers(errors: Sequence[Mapping[str, Any]], body: object) -> bool:
    """Replaces floats such as 16.0 by integers where these are required, and returns whether there were any.

    Only the first wrong item of a list is reported, so all items are looked at, in all lists of this place.
    """
    wrong = [path_of(error) for error in errors if error["type"] == "int_type"]
    places = {tuple(_ANY if isinstance(part, int) else part for part in path) for path in wrong}
    found = [_make_integers(body, place) for place in places]
    return any(found)


def _make_integers(value: Any, place: tuple[Any, ...]) -> bool:
    """Replaces the floats at a place below a value; returns whether there were any."""
    if not place:
        return False
    part, *rest = place
    if isinstance(value, list) and part is _ANY:
        keys: Iterable[Any] = range(len(value))
    elif isinstance(value, dict) and part in value:
        keys = (part,)
    else:
        return False
    found = False
    for key in keys:
        item = value[key]
        if rest:
            found = _make_integers(item, tuple(rest)) or found
        elif isinstance(item, float) and item.is_integer():
            value[key], found = int(item), True
    return found
