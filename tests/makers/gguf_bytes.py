"""GGUF files from their parts, each of which may be wrong."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ALIGNMENT = 32

_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class Entry:
    """A line of the table of tensors; dimensions as in the file, innermost first."""

    name: bytes
    dimensions: Sequence[int]
    type: int
    offset: int

    def to_bytes(self) -> bytes:
        sizes = struct.pack(f"<I{len(self.dimensions)}Q", len(self.dimensions), *self.dimensions)
        return string(self.name) + sizes + struct.pack("<IQ", self.type, self.offset)


def string(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def key_value(key: str, value: Any) -> bytes:
    """An int as the narrowest of u32, i32, u64 and i64 that has room."""
    type_ = _type(value)
    return string(key.encode()) + struct.pack("<I", type_) + _payload(type_, value)


def header(metadata: Mapping[str, Any], entries: Iterable[Entry]) -> bytes:
    """Up to where the tensors' data begins."""
    table = [entry.to_bytes() for entry in entries]
    data = struct.pack("<4sIQQ", b"GGUF", 3, len(table), len(metadata))
    data += b"".join(key_value(key, value) for key, value in metadata.items()) + b"".join(table)
    return data + bytes(-len(data) % ALIGNMENT)


def number_fields(data: bytes) -> list[tuple[int, int]]:
    """Returns (position, size) of every count, length, type, dimension, offset and number in the header of a sound
    file."""
    return _Walk(data).fields


class _Walk:
    def __init__(self, data: bytes) -> None:
        self.data, self.pos = data, 4
        self.fields: list[tuple[int, int]] = []
        self.number(4)
        num_tensors, num_pairs = self.number(8), self.number(8)
        for _ in range(num_pairs):
            self.string()
            self.value(self.number(4))
        for _ in range(num_tensors):
            self.string()
            for _ in range(self.number(4)):
                self.number(8)
            self.number(4)
            self.number(8)

    def number(self, size: int) -> int:
        self.fields.append((self.pos, size))
        self.pos += size
        return int.from_bytes(self.data[self.pos - size : self.pos], "little")

    def string(self) -> None:
        length = self.number(8)
        self.pos += length

    def value(self, type_: int) -> None:
        if type_ == _STRING:
            self.string()
        elif type_ == _ARRAY:
            item_type, length = self.number(4), self.number(8)
            for _ in range(length):
                self.value(item_type)
        else:
            self.number(struct.calcsize(_CODES[type_]))


def _type(value: Any) -> int:
    if isinstance(value, bool):
        return 7
    if isinstance(value, int):
        if value >= 0:
            return 4 if value < 1 << 32 else 10
        return 5 if value >= -(1 << 31) else 11
    if isinstance(value, float):
        return 6
    return _STRING if isinstance(value, str) else _ARRAY


def _payload(type_: int, value: Any) -> bytes:
    if type_ == _STRING:
        return string(value.encode())
    if type_ != _ARRAY:
        return struct.pack(f"<{_CODES[type_]}", value)
    item_type = max((_type(item) for item in value), default=4)
    items = b"".join(_payload(item_type, item) for item in value)
    return struct.pack("<IQ", item_type, len(value)) + items
