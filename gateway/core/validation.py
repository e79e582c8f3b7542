"""What pydantic finds wrong with a request, as one error that names the parameter at fault."""

from collections.abc import Mapping, Sequence
from typing import Any

from pagewire.gateway.core.errors import ApiError


def from_validation(errors: Sequence[Mapping[str, Any]], body: object) -> ApiError:
    """The first faulty parameter of a request, by name, with everything that is wrong with it."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['ctx']['error']} at position {first['loc'][-1]}")
    if isinstance(body, bytes):
        return ApiError(400, "send a JSON object with the header Content-Type: application/json")
    if not isinstance(body, dict):
        return ApiError(400, "the body must be a JSON object")
    # A union reports every branch; the one that came furthest is the one that was meant.
    located = [
        (_path(error, body), _lower_first(error["msg"])) for error in errors if error["loc"][1:2] == first["loc"][1:2]
    ]
    path = max((path for path, _ in located), key=len)
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    messages = dict.fromkeys(message for other, message in located if other == path)
    return ApiError(400, f"{param}: {', or '.join(messages)}", param=param)


def with_integers(errors: Sequence[Mapping[str, Any]], body: object) -> bool:
    """Whether numbers such as 16.0 stand where integers belong, which to JSON they are: puts these there."""
    found = False
    for path in {_path(error, body) for error in errors if error["type"] == "int_type"}:
        holder: Any = body
        for part in path[:-1]:
            holder = holder[part]
        # The first wrong one of a list is told, so all of it is looked at.
        for key in range(len(holder)) if isinstance(holder, list) else path[-1:]:
            if isinstance(value := holder[key], float) and value.is_integer():
                holder[key], found = int(value), True
    return found


def _path(error: Mapping[str, Any], body: object) -> tuple[str | int, ...]:
    """("messages", 0, "content"): a pydantic location without the parts that name a branch of a union."""
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
