"""The errors that pydantic finds in a request, as one ApiError that names the parameter."""

from collections.abc import Mapping, Sequence
from typing import Any

from pagewire.gateway.core.errors import ApiError


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
    """Replaces floats such as 16.0 by integers where these are required, and returns whether there were any."""
    found = False
    for path in {_path(error, body) for error in errors if error["type"] == "int_type"}:
        holder: Any = body
        for part in path[:-1]:
            holder = holder[part]
        # Only the first wrong item of a list is reported, so all are checked.
        for key in range(len(holder)) if isinstance(holder, list) else path[-1:]:
            if isinstance(value := holder[key], float) and value.is_integer():
                holder[key], found = int(value), True
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
