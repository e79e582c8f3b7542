"""The errors that pydantic finds in a request, as one ApiError that names the parameter."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pagewire.gateway.core.errors import ApiError

_ANY = object()  # any item of a list


def from_validation(errors: Sequence[Mapping[str, Any]], body: object) -> ApiError:
    """Returns the error of the first invalid parameter, with everything that is wrong with it."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['ctx']['error']} at position {first['loc'][-1]}")
    if isinstance(body, bytes):
        return ApiError(400, "send a JSON object with the header Content-Type: application/json")
    if not isinstance(body, dict):
        return ApiError(400, "the body must be a JSON object")
    # A union reports every branch; the intended branch is the one that got furthest.
    located = [
        (_path(error, body), _lower_first(error["msg"])) for error in errors if error["loc"][1:2] == first["loc"][1:2]
    ]
    path = max((path for path, _ in located), key=len)
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    messages = dict.fromkeys(message for other, message in located if other == path)
    return ApiError(400, f"{param}: {', or '.join(messages)}", param=param)


def with_integers(errors: Sequence[Mapping[str, Any]], body: object) -> bool:
    """Replaces floats such as 16.0 by integers where these are required, and returns whether there were any.

    Only the first wrong item of a list is reported, so all items are looked at, in all lists of this place.
    """
    wrong = [_path(error, body) for error in errors if error["type"] == "int_type"]
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


def _path(error: Mapping[str, Any], body: object) -> tuple[str | int, ...]:
    """Returns a pydantic location without the branches of unions, as ("messages", 0, "content")."""
    path: list[str | int] = []
    value = body
    for part in error["loc"][1:]:
        if (isinstance(part, int) and isinstance(value, list)) or (isinstance(value, dict) and part in value):
            path.append(part)
            value = value[part]
    if error["type"] == "missing":
        path.append(error["loc"][-1])
    return tuple(path)


def _lower_first(text: str) -> str:
    text = text.removeprefix("Value error, ")
    return text[:1].lower() + text[1:]
