"""Answers without their pieces and ids, so that two answers to the same request are equal."""

from __future__ import annotations

import math
from typing import Any

# What differs from one answer to the next, or with what the prefix cache holds.
_INCIDENTAL = {
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
    "cached_tokens",
    "call_id",
    "completed_at",
    "created",
    "created_at",
    "id",
    "input_tokens",
    "item_id",
    "obfuscation",
    "request_id",
    "sequence_number",
}
# Text that comes piece by piece.
_PIECES = {"text", "content", "reasoning", "reasoning_content", "arguments", "partial_json", "thinking"}
# Of log probabilities: recomputed ones are rounded otherwise.
TOLERANCE = 2e-3


def whole(value: Any) -> Any:
    """An answer that came at once."""
    if isinstance(value, dict):
        return {key: whole(one) for key, one in value.items() if key not in _INCIDENTAL}
    return [whole(one) for one in value] if isinstance(value, list) else value


class Received:
    """Returns what the events of a stream say together."""

    def __init__(self) -> None:
        self.value: dict[str, Any] = {}
        self.error: str | None = None
        self.has_ended = False

    def add(self, event: dict[str, Any]) -> None:
        """The data of one event."""
        kind = str(event.get("type", ""))
        if event.get("error"):
            self.error = str(event["error"])
        elif kind.startswith("response."):
            self._add_of_response(kind, event)
        elif kind:
            self._add_of_message(kind, event)
        else:
            self.value = _merged(self.value, whole(event))

    def _add_of_response(self, kind: str, event: dict[str, Any]) -> None:
        if kind == "response.output_text.delta":
            place = f"{event['output_index']}.{event['content_index']}"
            self.value = _merged(self.value, {"told": {place: {"text": event["delta"]}}})
        elif kind == "response.failed":
            self.error = str(event["response"]["error"])
        elif kind in ("response.completed", "response.incomplete"):
            self.value["response"] = whole(event["response"])
            self.has_ended = True

    def _add_of_message(self, kind: str, event: dict[str, Any]) -> None:
        if kind == "content_block_delta":
            delta = {key: one for key, one in event["delta"].items() if key != "type"}
            self.value = _merged(self.value, {"blocks": [{"index": event["index"], **delta}]})
        elif kind == "message_delta":
            self.value = _merged(self.value, whole({"delta": event["delta"], "usage": event["usage"]}))
        elif kind == "message_stop":
            self.has_ended = True


def _merged(old: Any, new: Any, key: str = "") -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return {name: _merged(old.get(name), new.get(name), name) for name in {**old, **new}}
    if isinstance(old, list) and isinstance(new, list):
        return _merged_lists(old, new)
    if isinstance(old, str) and isinstance(new, str) and key in _PIECES:
        return old + new
    return old if new is None else new


def _merged_lists(old: list[Any], new: list[Any]) -> list[Any]:
    """Of choices, calls or blocks, which have an index; else the new ones follow."""
    if not all(isinstance(one, dict) and "index" in one for one in old + new):
        return old + new
    by_index = {one["index"]: one for one in old}
    for one in new:
        by_index[one["index"]] = _merged(by_index.get(one["index"], {}), one)
    return [by_index[index] for index in sorted(by_index)]


def difference(found: Any, expected: Any, place: str = "") -> str | None:
    """The first one, for people; None: there is none."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in {**expected, **found}:
            if key not in found or key not in expected:
                return f"{place}.{key} is {'missing' if key in expected else 'too much'}"
            if said := difference(found[key], expected[key], f"{place}.{key}"):
                return said
        return None
    if isinstance(expected, list) and isinstance(found, list):
        for index, (one, other) in enumerate(zip(found, expected, strict=False)):
            if said := difference(one, other, f"{place}[{index}]"):
                return said
        return None if len(found) == len(expected) else f"{place} has {len(found)} entries, not {len(expected)}"
    if isinstance(expected, float) and isinstance(found, int | float):
        is_close = math.isclose(found, expected, abs_tol=TOLERANCE)
        return None if is_close else f"{place} is {found}, not {expected}"
    if isinstance(expected, str) and isinstance(found, str) and expected != found:
        common = next((i for i, pair in enumerate(zip(found, expected, strict=False)) if len({*pair}) > 1), None)
        start = min(len(found), len(expected)) if common is None else common
        shown = slice(start, start + 40)
        return f"{place} goes on after {start} characters with {found[shown]!r}, not {expected[shown]!r}"
    return None if expected == found else f"{place} is {found!r}, not {expected!r}"
