"""JSON in flags: objects, in which a key that occurs twice is an error, and lists of texts."""

import json
from typing import Any


def loads(text: str) -> Any:
    """Parses JSON. Raises ValueError, also for an object that has a key twice."""
    return json.loads(text, object_pairs_hook=_object)


def texts(text: str) -> list[str]:
    """Returns the texts of a JSON list, or of a list with commas. Raises ValueError."""
    found = json.loads(text) if text.startswith("[") else [one.strip() for one in text.split(",") if one.strip()]
    if not all(isinstance(one, str) for one in found):
        raise ValueError("expected a list of texts")
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} is given twice: remove one")
    return found
