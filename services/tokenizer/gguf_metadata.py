"""The metadata of a GGUF file: key-value pairs at its start, before tensor descriptions and weights.

Written out here because the tokenizer needs only these and at once: the general reader of the `gguf` package takes
seconds for a vocabulary (an array view per token), this takes tens of milliseconds. Format: GGUF versions 2 and 3,
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; little-endian.
"""

import mmap
import struct
from pathlib import Path
from typing import Any

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)

_STRING = 8
_ARRAY = 9
# GGUF value type -> struct code
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_U64 = struct.Struct("<Q")
_U32 = struct.Struct("<I")


class GgufError(ValueError):
    """The file is not a GGUF file this parser can read; the message says where and why."""


def read_gguf_metadata(path: str | Path) -> dict[str, Any]:
    """All key-value pairs of the file: ints, floats, bools, strings, lists of these.

    Raises GgufError for files that are no GGUF, truncated, or inconsistent; OSError if the file cannot be read.
    """
    with Path(path).open("rb") as file:
        if file.seek(0, 2) < 24:
            raise GgufError(f"{path}: too short for a GGUF header")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Parser(data).read_metadata()
            except GgufError as error:
                raise GgufError(f"{path}: {error}") from None


class _Parser:
    """A cursor over the file. Every read is checked against the file's end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._size = len(data)
        self._pos = 0

    def read_metadata(self) -> dict[str, Any]:
        if self._data[:4] != MAGIC:
            raise GgufError(f"not a GGUF file (starts with {self._data[:4]!r})")
        self._pos = 4
        version = self._u32()
        if version not in SUPPORTED_VERSIONS:
            hint = " (a big-endian file?)" if version & 0xFFFF == 0 else ""
            raise GgufError(f"GGUF version {version} is not supported{hint}; versions 2 and 3 are")
        self._u64()  # number of tensors
        num_pairs = self._u64()
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string("a key")
            if key in metadata:
                raise GgufError(f"key {key!r} appears twice")
            metadata[key] = self._value(self._u32(), key)
        return metadata

    def _value(self, value_type: int, key: str) -> Any:
        if value_type == _STRING:
            return self._string(key)
        if value_type == _ARRAY:
            return self._array(key)
        return self._scalars(value_type, 1, key)[0]

    def _array(self, key: str) -> list[Any]:
        item_type = self._u32()
        length = self._u64()
        if item_type == _STRING:
            return self._strings(length, key)
        if item_type == _ARRAY:
            # Each inner array takes 12 bytes at least, which bounds the length before anything is allocated.
            self._need(12 * length, key)
            return [self._array(key) for _ in range(length)]
        return list(self._scalars(item_type, length, key))

    def _scalars(self, value_type: int, count: int, key: str) -> tuple[Any, ...]:
        code = _SCALARS.get(value_type)
        if code is None:
            raise GgufError(f"{key!r} has the unknown value type {value_type}")
        self._need(struct.calcsize(code) * count, key)
        values = struct.unpack_from(f"<{count}{code}", self._data, self._pos)
        self._pos += struct.calcsize(code) * count
        return values

    def _strings(self, count: int, key: str) -> list[str]:
        """The hot loop: vocabularies have 10^5 strings."""
        self._need(8 * count, key)
        data, size, pos = self._data, self._size, self._pos
        unpack, strings = _U64.unpack_from, []
        for _ in range(count):
            if pos + 8 > size:
                raise GgufError(f"{key!r} runs past the end of the file")
            end = pos + 8 + unpack(data, pos)[0]
            if end > size:
                raise GgufError(f"{key!r} runs past the end of the file")
            # Some files cut a string inside a character: one odd token must not make the rest unusable.
            strings.append(data[pos + 8 : end].decode("utf-8", "replace"))
            pos = end
        self._pos = pos
        return strings

    def _string(self, key: str) -> str:
        return self._strings(1, key)[0]

    def _u32(self) -> int:
        self._need(4, "the header")
        (value,) = _U32.unpack_from(self._data, self._pos)
        self._pos += 4
        return value

    def _u64(self) -> int:
        self._need(8, "the header")
        (value,) = _U64.unpack_from(self._data, self._pos)
        self._pos += 8
        return value

    def _need(self, num_bytes: int, what: str) -> None:
        if self._pos + num_bytes > self._size:
            raise GgufError(f"{what!r} runs past the end of the file")
