"""The header of a GGUF file: metadata, and the table of tensors that follows it.

Used by both services that read models: the general reader of the `gguf` package takes seconds for a vocabulary (an
array view per token), this one tens of milliseconds. Format: GGUF versions 2 and 3, little-endian,
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import mmap
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagewire.files.damaged_file import remedy

MAGIC = b"GGUF"
TOKENS = "tokenizer.ggml.tokens"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_NESTING = 8  # of arrays; real files have none
MAX_NAME_LENGTH = 256  # of keys and tensors; real ones stay below 64, and errors repeat them
MAX_VALUES = 1 << 23  # keys, array items and tensors; bounds time and memory. Large vocabularies have 2e6

_STRING = 8
_ARRAY = 9
# GGUF value type -> struct code
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_U64 = struct.Struct("<Q")
_U32 = struct.Struct("<I")


class GgufError(ValueError):
    """Raised for a file that this parser cannot read; the message states the place and the reason."""


@dataclass(frozen=True)
class TensorEntry:
    """An entry of the table. `shape` has the outermost dimension first, as in torch (reversed in the file)."""

    name: str
    shape: tuple[int, ...]
    type: int  # ggml_type
    offset: int  # bytes from GgufHeader.data_offset


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF file.

    metadata: ints, floats, bools, strings, lists of these. data_offset: the byte at which tensor data begins."""

    metadata: dict[str, Any]
    tensors: list[TensorEntry]
    data_offset: int


def read_metadata(path: str | Path) -> dict[str, Any]:
    """Returns the metadata of the file. Raises GgufError, which names the file; OSError if it cannot be read."""
    with Path(path).open("rb") as file:
        if not file.seek(0, 2):
            raise GgufError(f"{path}: the file is empty; download it again")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return read_header(data).metadata
            except GgufError as error:
                raise GgufError(f"{path}: {error}; {remedy(Path(path))}") from None


def read_header(data: mmap.mmap | bytes, *, skip_string_arrays: bool = False, kept: Collection[str] = ()) -> GgufHeader:
    """Reads the header of a whole file. Raises GgufError for data that is not GGUF, truncated or inconsistent.

    skip_string_arrays: leaves out vocabularies, which take most of the time, but for the keys in `kept`.
    """
    return _Parser(data, skip_string_arrays, kept).read_header()


class _Parser:
    """A cursor over the file. Every read is checked against the end of the file."""

    def __init__(self, data: mmap.mmap | bytes, skip_string_arrays: bool, kept: Collection[str]) -> None:
        self._data = data
        self._skip_string_arrays = skip_string_arrays
        self._kept = kept
        self._size = len(data)
        self._pos = 0
        self._num_values = 0

    def read_header(self) -> GgufHeader:
        if self._data[:4] != MAGIC:
            raise GgufError(f"not a GGUF file (starts with {self._data[:4]!r})")
        self._pos = 4
        version = self._u32()
        if version not in SUPPORTED_VERSIONS:
            hint = " (a big-endian file?)" if version & 0xFFFF == 0 else ""
            raise GgufError(f"GGUF version {version} is not supported{hint}; versions 2 and 3 are")
        num_tensors, num_pairs = self._u64(), self._u64()
        metadata = self._metadata(num_pairs)
        tensors = self._tensor_entries(num_tensors)
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment not in (1 << bits for bits in range(32)):
            raise GgufError(f"general.alignment is {alignment!r}, expected a power of two")
        for entry in tensors:
            if entry.offset % alignment:
                raise GgufError(f"tensor {entry.name!r} begins at byte {entry.offset}, not a multiple of {alignment}")
        return GgufHeader(metadata, tensors, data_offset=-(-self._pos // alignment) * alignment)

    def _metadata(self, num_pairs: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        seen: set[str] = set()
        self._reserve(num_pairs, 12, "the metadata")
        for _ in range(num_pairs):
            key = self._name("a key")
            if key in seen:
                raise GgufError(f"key {key!r} appears twice")
            seen.add(key)
            value = self._value(self._u32(), key)
            if value is not None:
                metadata[key] = value
        return metadata

    def _tensor_entries(self, num_tensors: int) -> list[TensorEntry]:
        entries: dict[str, TensorEntry] = {}
        self._reserve(num_tensors, 12, "the table of tensors")
        for _ in range(num_tensors):
            entry = self._tensor_entry()
            if entry.name in entries:
                raise GgufError(f"tensor {entry.name!r} appears twice")
            entries[entry.name] = entry
        return list(entries.values())

    def _tensor_entry(self) -> TensorEntry:
        name = self._name("the name of a tensor")
        num_dimensions = self._u32()
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise GgufError(f"tensor {name!r} has {num_dimensions} dimensions")
        dimensions = [self._u64() for _ in range(num_dimensions)]
        return TensorEntry(name, tuple(reversed(dimensions)), self._u32(), self._u64())

    def _value(self, value_type: int, key: str) -> Any:
        """Reads a value; None if it is left out."""
        if value_type == _STRING:
            return self._string(key)
        if value_type == _ARRAY:
            return self._array(key)
        return self._scalars(value_type, 1, key)[0]

    def _array(self, key: str, depth: int = 1) -> list[Any] | None:
        if depth > MAX_NESTING:
            raise GgufError(f"{key!r} is an array nested more than {MAX_NESTING} deep")
        item_type = self._u32()
        length = self._u64()
        if item_type == _STRING:
            if not self._skip_string_arrays or key in self._kept:
                return self._strings(length, key)
            self._skip_strings(length, key)
            return None
        if item_type == _ARRAY:
            self._reserve(length, 12, key)
            return [self._array(key, depth + 1) for _ in range(length)]
        return list(self._scalars(item_type, length, key))

    def _scalars(self, value_type: int, count: int, key: str) -> tuple[Any, ...]:
        code = _SCALARS.get(value_type)
        if code is None:
            raise GgufError(f"{key!r} has the unknown value type {value_type}")
        self._reserve(count, struct.calcsize(code), key)
        values = struct.unpack_from(f"<{count}{code}", self._data, self._pos)
        self._pos += struct.calcsize(code) * count
        return values

    def _strings(self, count: int, key: str) -> list[str]:
        """Reads strings. This is the hot loop: vocabularies have 10^5 strings."""
        self._reserve(count, 8, key)
        data, size, pos = self._data, self._size, self._pos
        unpack, strings = _U64.unpack_from, []
        for _ in range(count):
            if pos + 8 > size:
                raise GgufError(f"{key!r} runs past the end of the file")
            end = pos + 8 + unpack(data, pos)[0]
            if end > size:
                raise GgufError(f"{key!r} runs past the end of the file")
            # Some files cut a string within a character: one bad token must not make the rest unusable.
            strings.append(data[pos + 8 : end].decode("utf-8", "replace"))
            pos = end
        self._pos = pos
        return strings

    def _skip_strings(self, count: int, key: str) -> None:
        self._reserve(count, 8, key)
        size, pos, unpack = self._size, self._pos, _U64.unpack_from
        for _ in range(count):
            if pos + 8 > size:
                break
            pos += 8 + unpack(self._data, pos)[0]
        self._pos = pos
        self._need(0, key)

    def _string(self, key: str) -> str:
        return self._strings(1, key)[0]

    def _name(self, what: str) -> str:
        name = self._string(what)
        if len(name) > MAX_NAME_LENGTH:
            raise GgufError(f"{what} has {len(name)} characters: {name[:40]!r}...")
        return name

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

    def _reserve(self, count: int, min_bytes: int, what: str) -> None:
        """Checks that `count` values of at least `min_bytes` each fit into the file. Call it before they are read."""
        self._need(count * min_bytes, what)
        self._num_values += count
        if self._num_values > MAX_VALUES:
            raise GgufError(f"{what!r} has {count} values, {self._num_values} with those before; {MAX_VALUES} are read")

    def _need(self, num_bytes: int, what: str) -> None:
        if self._pos + num_bytes > self._size:
            raise GgufError(f"{what!r} runs past the end of the file")
