"""The errors that pydantic finds in a request, as one ApiError that names the parameter."""

from collections.abc import Mapping, Sequence
from typing import Any

from pagewire.gateway.core.errors import ApiError

# Names of branches in locations: a branch of a union, and what follows a tag. Those of pydantic may be members' names.
BRANCH, TAGGED = "\0branch", "\0tagged"
# The kind of errors that name a member of the object at their place.
OF_MEMBER = "of_member"
_SHOULD_BE = "input should be "
_SHOWN = 20  # characters of what was sent


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
    located = [(path_of(error), error) for error in errors if error["loc"][1:2] == first["loc"][1:2]]
    path = max((path for path, _ in located), key=lambda path: [part if isinstance(part, int) else 0 for part in path])
    found = [error for other, error in located if other == path]
    found = [error for error in found if not error["type"].endswith("_type")] or found  # a branch of the right type
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    context = found[0].get("ctx", {})
    if "before" in context:  # see `names.py`
        message = f"{context['before']} {param!r}{context['after']}"
        return ApiError(400, message, param=param, code=context["code"])
    words, *others = dict.fromkeys(map(_words, found))
    words = ", or ".join([words, *(other.removeprefix(_SHOULD_BE) for other in others)])
    return ApiError(400, f"{param}: {words}", param=param)


def path_of(error: Mapping[str, Any]) -> tuple[str | int, ...]:
    """Returns a pydantic location without the branches of unions, as ("messages", 0, "content")."""
    path: list[str | int] = []
    for part in error["loc"][1:]:
        if part == TAGGED:
            path.pop()
        elif part != BRANCH:
            path.append(part)
    if path[-1:] == ["[key]"]:
        path.pop()
    if error["type"] == OF_MEMBER:
        path.append(error["ctx"]["member"])
    elif error["type"].startswith("union_tag_"):
        path.append("type")
    return tuple(path)


def _words(error: Mapping[str, Any]) -> str:
    """Returns what is wrong, in words that follow "parameter: "."""
    kind, context, words = error["type"], error.get("ctx", {}), error["msg"].removeprefix("Value error, ")
    if kind == OF_MEMBER:
        return str(context["words"])
    if kind == "union_tag_not_found":
        return "field required"
    if kind == "union_tag_invalid":
        return f"{_SHOULD_BE}one of {context['expected_tags']}, not {context['tag'][:_SHOWN]!r}"
    if kind in ("dict_type", "model_type", "model_attributes_type"):
        return f"{_SHOULD_BE}a valid object"
    words = words[:1].lower() + words[1:].replace(" after validation", "")
    if not kind.startswith(("greater_than", "less_than")):
        return words
    (bound,) = context.values()
    shown = f"{bound:.8g}" if isinstance(bound, float) else str(bound)  # pydantic writes many zeros
    return f"{words[: words.rindex(' ')]} {shown}, not {_shown(error['input'])}"


def _shown(number: float) -> str:
    """Returns a number as clients write it: one with an exponent may have become a long integer."""
    text = str(number)
    return text if len(text) <= _SHOWN else f"{text[0]}.{text[1:_SHOWN]}... * 10**{len(text) - 1}"
