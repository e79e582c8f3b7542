"""JSON of request bodies, read in bounded time: what has too many values is refused before any of them is made."""

import asyncio
import json
import re
import sys
from typing import Any

from fastapi.exceptions import RequestValidationError

from pagewire.files.json_counts import COUNTED_BYTES, TooManyValues, check_counts
from pagewire.gateway.core.errors import ApiError

# Of an integer. Reading one takes the square of their number.
MAX_DIGITS = 640
_PIECE = 4 * 1024 * 1024  # bytes that are searched in one turn of the event loop

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
