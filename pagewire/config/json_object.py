"""JSON in flags, where a key that is given twice is a mistake: which of both was meant, nobody knows."""

import json
from typing import Any


def loads(text: str) -> Any:
    """As `json.loads`. Raises ValueError also for an object that has a key twice."""
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} is given twice: remove one")
    return found
