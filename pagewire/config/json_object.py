"""JSON in flags, in which a key that occurs twice is an error."""

import json
from typing import Any


def loads(text: str) -> Any:
    """Parses JSON. Raises ValueError, also for an object that has a key twice."""
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} is given twice: remove one")
    return found
