"""A GGUF file as mapped: its metadata, and a view of each tensor's bytes."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from pagewire.gguf import TensorEntry, read_header
from services.executor.model_config import ModelLoadError


@dataclass(frozen=True)
class GgufTensor:
    """One tensor as stored. `shape` is outermost dimension first, as in torch (the file has it reversed)."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    data: np.ndarray  # uint8 [num_rows, bytes per row], mapped


class GgufFile:
    """A mapped GGUF file. `metadata` has every key but those whose value is an array of strings.

    Raises ModelLoadError naming the file when it is truncated or not GGUF.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                # Copy-on-write, because torch warns of memory that it could not write to.
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            header = read_header(self._data, skip_string_arrays=True)
            self.metadata = header.metadata
            self.tensors = {entry.name: self._tensor(entry, header.data_offset) for entry in header.tensors}
        except (OverflowError, KeyError, ValueError, OSError) as error:
            raise ModelLoadError(f"{path}: truncated or not a GGUF file ({error}); download it again") from error

    def _tensor(self, entry: TensorEntry, data_offset: int) -> GgufTensor:
        name, shape, type_ = entry.name, entry.shape, GGMLQuantizationType(entry.type)
        start = data_offset + entry.offset
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
        return GgufTensor(name, shape, type_, data)
