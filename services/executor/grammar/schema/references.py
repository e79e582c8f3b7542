"""References within a schema."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from pagewire.services.executor.grammar.schema.errors import step, wrong

_ANCHORS = ("$anchor", "$dynamicAnchor")


class References:
    """The places of a document that references name."""

    def __init__(self, root: Any) -> None:
        self._root = root
        own = root.get("$id", root.get("id")) if isinstance(root, dict) else None
        self._own_address = own.rstrip("#") if isinstance(own, str) else None
        self._anchors: dict[str, str] | None = None

    def pointer(self, reference: Any, place: str) -> str:
        """Returns the JSON pointer that a reference means. Raises SchemaError."""
        if not isinstance(reference, str):
            wrong(place, "must be a text")
        address, _, fragment = reference.partition("#")
        if address and address != self._own_address:
            wrong(place, f"{reference[:100]!r} is not in the schema; put what it refers to into $defs")
        pointer = unquote(fragment)
        if pointer and not pointer.startswith("/"):
            pointer = self._anchor(pointer, place)
        if self._find(pointer) is None:
            wrong(place, f"nothing is at {reference[:100]!r}")
        return pointer

    def at(self, pointer: str) -> Any:
        """Returns what is at a pointer that `pointer` has returned."""
        found = self._find(pointer)
        assert found is not None
        return found[0]

    def _find(self, pointer: str) -> tuple[Any] | None:
        value = self._root
        for key in pointer.split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and key in value:
                value = value[key]
            elif isinstance(value, list) and key.isdecimal() and len(key) < 10 and int(key) < len(value):
                value = value[int(key)]
            else:
                return None
        return (value,)

    def _anchor(self, name: str, place: str) -> str:
        if self._anchors is None:
            self._anchors = {}
            pending: list[tuple[str, Any]] = [("", self._root)]
            while pending:
                pointer, value = pending.pop()
                if isinstance(value, dict):
                    for key in _ANCHORS:
                        if isinstance(anchor := value.get(key), str):
                            self._anchors.setdefault(anchor, pointer)
                    pending += [(step(pointer, key), part) for key, part in value.items()]
                elif isinstance(value, list):
                    pending += [(step(pointer, index), part) for index, part in enumerate(value)]
        if name not in self._anchors:
            wrong(place, f"nothing is at '#{name[:100]}'")
        return self._anchors[name]
