"""JSON of request bodies, read in bounded time: what has too many values is refused before any of them is made."""

import asyncio
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError

from pagewire.files.json_counts import COUNTED_BYTES, TooManyValues, check_counts
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.validation import path_of

# Of an integer. Reading one takes the square of their number.
MAX_DIGITS = 640
_PIECE = 4 * 1024 * 1024  # bytes that are searched in one turn of the event loop

_ANY = object()  # any item of a list

# Half of a surrogate pair: two halves make a character, a lone half is invalid.
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def limit_integers() -> None:
    """Has every reader of JSON in this process refuse integers of more than MAX_DIGITS digits."""
    sys.set_int_max_str_digits(MAX_DIGITS)


async def parse_json(content: bytes) -> Any:
    """Returns the value of a JSON text.

    Raises RequestValidationError or ApiError, RecursionError if it is nested too deeply, and UnicodeEncodeError for
    half a surrogate pair, which a text with JSON in it would carry to services that fail on it.
    """
    if not json.detect_encoding(content).startswith("utf-8"):
        raise ApiError(400, "the body is not valid JSON: not UTF-8")
    is_large = len(content) > COUNTED_BYTES
    try:
        if is_large:
            await asyncio.to_thread(check_counts, content)
        body = json.loads(content.decode("utf-8-sig"))  # json would accept half a surrogate pair in bytes
    except TooManyValues as error:
        raise ApiError(400, f"the body has {error}", code="body_too_complex") from None
    except json.JSONDecodeError as error:
        invalid = {"type": "json_invalid", "loc": ("body", error.pos), "ctx": {"error": error.msg}}
        raise RequestValidationError([invalid], body=None) from None
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: not UTF-8 at byte {error.start}") from None
    except ValueError:  # see limit_integers()
        message = f"the body has an integer of more than {MAX_DIGITS} digits; write it as text, or as a decimal number"
        raise ApiError(400, message, code="body_too_complex") from None
    if is_large:
        await asyncio.sleep(0)
    if await _has_escaped_surrogates(content):
        json.dumps(body, ensure_ascii=False).encode()
    return body


async def _has_escaped_surrogates(content: bytes) -> bool:
    for start in range(0, len(content), _PIECE):
        if _ESCAPED_SURROGATE.search(content, start, start + _PIECE + 3):
            return True
        if start + _PIECE < len(content):
            await asyncio.sleep(0)
    return False


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
