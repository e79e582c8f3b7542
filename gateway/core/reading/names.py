"""Names of parameters in an object: known, refused with a reason, or unknown."""

import difflib
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from pydantic_core import PydanticCustomError

from pagewire.gateway.core.validation import OF_MEMBER

_LONGEST_NAME = 64  # that is worth a hint: finding one takes its square


class Refused(NamedTuple):
    """The reason for refusing a parameter.

    Harmless values, which change nothing, are accepted (null always is): some clients always send them.
    """

    why: str
    harmless: tuple[Any, ...] = ()
    code: str = "unsupported_parameter"


def wrong_member(member: str, words: str) -> PydanticCustomError:
    """Returns the error of a member of the object that is validated: `member: words`."""
    return PydanticCustomError(OF_MEMBER, "{member}: {words}", {"member": member, "words": words})


def check_names(
    data: Mapping[str, Any], known: Collection[str], unsupported: Mapping[str, Refused], *, takes_any: bool = False
) -> dict[str, Any]:
    """Returns `data` without what changes nothing: null under any other name, and unsupported parameters with a
    harmless value.

    Raises PydanticCustomError for an unsupported parameter with another value and, unless takes_any, for an unknown
    one, with the nearest known name.
    """
    kept = {}
    for name, value in data.items():
        if name in known:
            kept[name] = value
        elif name in unsupported:
            if value is not None and not _is_harmless(value, unsupported[name]):
                raise _refused(name, unsupported[name])
        elif takes_any:
            kept[name] = value
        elif value is not None:
            raise _unknown(name, [*known, *unsupported])
    return kept


def _is_harmless(value: Any, refused: Refused) -> bool:
    return any(value == harmless and type(value) is type(harmless) for harmless in refused.harmless)


def _refused(name: str, refused: Refused) -> PydanticCustomError:
    default = f" (only {refused.harmless[0]!r} or null)" if refused.harmless else ""
    return _of_name(name, "parameter", f" is not supported{default}: {refused.why}", refused.code)


def _unknown(name: str, names: list[str]) -> PydanticCustomError:
    nearest = difflib.get_close_matches(name, names, n=1) if len(name) <= _LONGEST_NAME else []
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return _of_name(name[: 2 * _LONGEST_NAME], "unknown parameter", hint, "unknown_parameter")


def _of_name(name: str, before: str, after: str, code: str) -> PydanticCustomError:
    context = {"member": name, "before": before, "after": after, "code": code}
    return PydanticCustomError(OF_MEMBER, "{before} {member}{after}", context)
