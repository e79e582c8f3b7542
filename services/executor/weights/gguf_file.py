"""Reads the header of a GGUF file: metadata and the table of tensors.

Format: the GGUF specification, versions 2 and 3, little-endian. The `gguf` package's own reader makes a numpy
object of every vocabulary entry, which takes seconds; here string arrays are stepped over.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from services.executor.model_config import ModelLoadError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor as stored. `shape` is outermost dimension first, as in torch (the file has it reversed)."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    data: np.ndarray  # uint8 [num_rows, bytes per row], mapped


class GGUFFile:
    """A mapped GGUF file. `metadata` has every key but those whose value is an array of strings.

    Raises ModelLoadError naming the file when it is truncated or not GGUF.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            with path.open("rb") as file:
                # Copy-on-write, because torch warns of memory that it could not write to.
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._offset = 0
            self._read_header()
        except (struct.error, OverflowError, KeyError, ValueError, OSError) as error:
            raise ModelLoadError(f"{path}: truncated or not a GGUF file ({error}); download it again") from error

    def _read_header(self) -> None:
        magic, version = self._unpack("4sI")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"magic {magic!r}, version {version}; versions 2 and 3 are supported")
        num_tensors, num_keys = self._unpack("QQ")
        for _ in range(num_keys):
            key = self._string()
            value = self._value(self._unpack("I")[0])
            if value is not None:
                self.metadata[key] = value
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if alignment not in (1 << bits for bits in range(32)):
            raise ValueError(f"general.alignment is {alignment!r}, expected a power of two")
        start = -(-self._offset // alignment) * alignment
        for name, shape, type_, offset in entries:
            self.tensors[name] = self._tensor(name, shape, GGMLQuantizationType(type_), start + offset)

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        layout = "<" + layout
        values = struct.unpack_from(layout, self._data, self._offset)
        self._offset += struct.calcsize(layout)
        return values

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        (value,) = self._unpack(f"{length}s")
        return value.decode()

    def _value(self, type_: int) -> Any:
        if type_ == _STRING:
            return self._string()
        if type_ != _ARRAY:
            return self._unpack(_SCALARS[type_])[0]
        item_type, count = self._unpack("IQ")
        if item_type == _STRING:
            return self._skip_strings(count)
        if item_type == _ARRAY:
            return [self._value(_ARRAY) for _ in range(count)]
        return list(self._unpack(f"{count}{_SCALARS[item_type]}"))

    def _skip_strings(self, count: int) -> None:
        offset, unpack_length = self._offset, struct.Struct("<Q").unpack_from
        for _ in range(count):
            offset += 8 + unpack_length(self._data, offset)[0]
        self._offset = offset

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (num_dims,) = self._unpack("I")
        if not 1 <= num_dims <= 4:
            raise ValueError(f"tensor {name} has {num_dims} dimensions")
        dims = self._unpack(f"{num_dims}Q")
        type_, offset = self._unpack("IQ")
        return name, dims[::-1], type_, offset

    def _tensor(self, name: str, shape: tuple[int, ...], type_: GGMLQuantizationType, start: int) -> GGUFTensor:
        block, block_bytes = GGML_QUANT_SIZES[type_]
        if shape[-1] % block:
            raise ValueError(f"tensor {name}: row of {shape[-1]} is not a multiple of {type_.name}'s block of {block}")
        row_bytes = shape[-1] // block * block_bytes
        num_rows = math.prod(shape[:-1])
        if start + num_rows * row_bytes > len(self._data):
            raise ValueError(
                f"tensor {name} ends at byte {start + num_rows * row_bytes}, the file at {len(self._data)}"
            )
        data = np.frombuffer(self._data, np.uint8, num_rows * row_bytes, start).reshape(num_rows, row_bytes)
        return GGUFTensor(name, shape, type_, data)
