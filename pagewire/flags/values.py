"""Converts the text of a flag, variable or key to its value."""

import dataclasses
import json
import math
import re
import typing
from typing import Any

from pagewire.config import json_object
from pagewire.config.values.texts import FORM_OF, FORMS, LONGEST_PATH
from pagewire.flags.names import base_type, is_list

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kmgt])|([KMGT])(?:iB?)?)?")
_LARGEST = 2**63 - 1
_TRUE = {"true", "1", "yes", "on"}
_FALSE = {"false", "0", "no", "off"}


class UsageError(Exception):
    """A flag, variable or key that is unknown or has a bad value."""


def parse_size(text: str) -> int:
    """Parses a size: "2k" = 2000, "2K" = "2Ki" = "2KiB" = 2048, "0.5GiB" = 2**29. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not a size: {text!r}")
    number, decimal, binary = match.groups()
    unit = 1000 ** (" kmgt".index(decimal)) if decimal else 1024 ** (" KMGT".index(binary)) if binary else 1
    size = float(number) * unit if "." in number else int(number) * unit
    if size != int(size):
        raise ValueError(f"not a whole number: {text!r}")
    return int(size)


def parse_switch(text: str | bool, source: str) -> bool:
    """Parses true or false. Raises UsageError."""
    lowered = str(text).lower()
    if lowered in _TRUE | _FALSE:
        return lowered in _TRUE
    raise UsageError(f"{source}: expected true or false, got {text!r}")


def convert(field: dataclasses.Field[Any], text: str | bool, source: str) -> Any:
    """Returns the value of a field from its text. Raises UsageError naming source, value and expectation."""
    base = base_type(field)
    if base is bool:
        return parse_switch(text, source)
    return _text_value(field, str(text), source) if base is str else _number(field, str(text), source)


def json_value(text: str, source: str) -> dict[str, Any]:
    """Parses a JSON object. Raises UsageError."""
    try:
        value = json_object.loads(text)
    except json.JSONDecodeError:
        value = None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{source}: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{source}: expected a JSON object, got {text!r:.200}")
    return value


def _texts(text: str, source: str) -> None:
    """Raises UsageError for the text of no list."""
    try:
        json_object.texts(text)
    except (ValueError, RecursionError):
        message = f"""{source}: expected a JSON list of texts such as '["*"]', got {text!r:.200}"""
        raise UsageError(message) from None


def host(text: str, source: str) -> str:
    """Returns the name or the address of a host, without the brackets of a URL. Raises UsageError."""
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    _check_form("host", text, source)
    return text


def _check_form(kind: str, text: str, source: str, *, secret: bool = False) -> None:
    """Raises UsageError for a text that is not of its kind. secret: leaves the text out of the error."""
    try:
        FORMS[kind](text)
    except ValueError as error:
        raise UsageError(f"{source}: expected {error}" + ("" if secret else f", got {text!r:.200}")) from error


def _text_value(field: dataclasses.Field[Any], text: str, source: str) -> str:
    choices, kind = field.metadata["choices"], field.metadata["kind"] or FORM_OF.get(field.name, "")
    if choices and text not in choices:
        if text.lower() in choices:  # AWQ, as tutorials write it
            return text.lower()
        raise UsageError(f"{source}: expected one of {', '.join(choices)}, got {text!r:.200}")
    if not text and field.default == "":
        return text
    if not text.strip() and not field.metadata["secret"] and kind != "host":
        raise UsageError(f"{source}: expected a value that is not empty, got {text!r}; leave it out for the default")
    if len(text.encode(errors="surrogatepass")) > LONGEST_PATH and kind in FORMS and not field.metadata["secret"]:
        raise UsageError(f"{source}: expected a text of at most {LONGEST_PATH} bytes, got {text!r:.100} and more")
    if kind == "json":
        json_value(text, source)
    if kind == "texts":
        _texts(text, source)
    if kind == "host":
        text = host(text, source)
    elif kind in FORMS:
        _check_form(kind, text, source, secret=field.metadata["secret"])
    parts = text.split(",") if field.metadata["takes"] == "words" else [text]
    if field.metadata["secret"] and any(not part or part != part.strip() for part in parts):
        # An empty secret would protect nothing, and HTTP drops spaces around the value of a header.
        raise UsageError(f"{source}: expected a value that is not empty and has no spaces around it")
    if field.metadata["secret"] and field.metadata["takes"] == "words" and text.split() != [text]:
        raise UsageError(f"{source}: expected values separated by commas, without spaces")
    return text


def _number(field: dataclasses.Field[Any], text: str, source: str) -> Any:
    base, valid, several = base_type(field), field.metadata["valid"], is_list(field)
    number = typing.get_args(base)[0] if several else base
    kind = "size" if field.metadata["kind"] == "size" else "whole number" if number is int else "number"
    items = text.split(",") if several else [text]
    try:
        values = tuple(parse_size(item) if kind == "size" else number(item) for item in items)
    except ValueError:
        values = ()
    # No process waits for ever, and greater whole numbers fit no message between services.
    if any(abs(value) > _LARGEST if number is int else not math.isfinite(value) for value in values):
        values = ()
    if not values or (valid is not None and not all(value in valid for value in values)):
        expected = (f"{kind}s separated by commas" if several else f"a {kind}") + (f" ({valid})" if valid else "")
        raise UsageError(f"{source}: expected {expected}, got {text!r:.200}")
    return values if several else values[0]
