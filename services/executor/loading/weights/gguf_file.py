"""A GGUF file as mapped: its metadata, and a view of each tensor's bytes."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from pagewire.files.damaged_file import remedy
from pagewire.files.gguf import TOKENS, TensorEntry, read_header
from pagewire.files.model_files import gguf_splits
from pagewire.services.executor.config.model_config import ModelLoadError

# How many tensors all parts of a model have.
_SPLIT_TENSORS = "split.tensors.count"
_TYPES = {type_.value: type_ for type_ in GGML_QUANT_SIZES}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor as stored. `shape` is outermost dimension first, as in torch (the file has it reversed)."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    data: np.ndarray  # uint8 [num_rows, bytes per row], mapped


class GgufFile:
    """A mapped GGUF file, or several that are the parts of one model. `metadata` is that of the first, with every key
    except arrays of strings, of which it has the tokens.

    Raises ModelLoadError naming the file when one is missing, truncated or not GGUF.
    """

    def __init__(self, path: Path) -> None:
        self.path, *others = gguf_splits(path)
        self.metadata, self.tensors = _mapped(self.path)
        for part in others:
            _, tensors = _mapped(part)
            if twice := tensors.keys() & self.tensors.keys():
                raise ModelLoadError(f"{part}: tensor {min(twice)} is in another part of the model; {remedy(part)}")
            self.tensors |= tensors
        expected = self.integer(_SPLIT_TENSORS, len(self.tensors))
        if others and expected != len(self.tensors):
            raise ModelLoadError(
                f"{self.path}: the {1 + len(others)} parts have {len(self.tensors)} tensors, the model has {expected}; "
                f"{remedy(self.path)}"
            )

    @cached_property
    def stated(self) -> Mapping[str, Any]:
        """Values by their keys without the architecture's name, and shapes of tensors by their names."""
        prefix = f"{self.metadata.get('general.architecture')}."
        values = {key.removeprefix(prefix): value for key, value in self.metadata.items()}
        return values | {name: tensor.shape for name, tensor in self.tensors.items()}

    def integer(self, key: str, default: int | None = None) -> int | None:
        """The metadata's value, of 32 bits. Raises ModelLoadError naming the key, as the next four do."""
        value = self.metadata.get(key, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 32):
            raise self._wrong(key, "a whole number below 2**32", value)
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.integer(key, default)
        if not value:
            raise self._wrong(key, "a positive whole number", value)
        return value

    def number(self, key: str, default: float | None = None) -> float | None:
        """Positive and finite; a whole one has 32 bits."""
        value = self.metadata.get(key, default)
        limit = 1 << 32 if isinstance(value, int) else math.inf
        if isinstance(value, bool) or (
            value is not None and not (isinstance(value, int | float) and 0 < value < limit)
        ):
            raise self._wrong(key, "a positive number", value)
        return value

    def text(self, key: str, default: str) -> str:
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def flag(self, key: str) -> bool | None:
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def _wrong(self, key: str, expected: str, value: object) -> ModelLoadError:
        return ModelLoadError(
            f"{self.path}: metadata key {key}: expected {expected}, found {value!r:.60}; "
            "the file is damaged, or its converter did not know the key: download or convert it again"
        )


def _mapped(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Returns the metadata and the tensors of one file. Raises ModelLoadError."""
    try:
        with path.open("rb") as file:
            # Copy-on-write, because torch warns of memory that it could not write to.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        header = read_header(data, skip_string_arrays=True, kept=(TOKENS,))
        tensors = {entry.name: _tensor(data, entry, header.data_offset) for entry in header.tensors}
        _check_apart(header.tensors, {name: tensor.data.nbytes for name, tensor in tensors.items()})
    except OSError as error:  # of a file that may be whole
        raise ModelLoadError(
            f"{path}: cannot be read ({error.strerror or error}): see to its permissions, the disk, free memory and"
            " `ulimit -v`"
        ) from error
    except (OverflowError, ValueError) as error:
        raise ModelLoadError(f"{path}: truncated or not a GGUF file ({error}); {remedy(path)}") from error
    return header.metadata, tensors


def _tensor(data: mmap.mmap, entry: TensorEntry, data_offset: int) -> GgufTensor:
    """Raises ValueError for an invalid entry or one that is not within the file."""
    name, shape = entry.name, entry.shape
    if entry.type not in _TYPES:
        raise ValueError(f"tensor {name} has the unknown type {entry.type}")
    type_ = _TYPES[entry.type]
    block, block_bytes = GGML_QUANT_SIZES[type_]
    if not all(shape):
        raise ValueError(f"tensor {name} is empty: its shape is {list(shape)}")
    if shape[-1] % block:
        raise ValueError(f"tensor {name}: row of {shape[-1]} is not a multiple of {type_.name}'s block of {block}")
    row_bytes = shape[-1] // block * block_bytes
    num_rows = math.prod(shape[:-1])
    start = data_offset + entry.offset
    end = start + num_rows * row_bytes
    if end > len(data):
        raise ValueError(f"tensor {name} ends at byte {end}, the file at {len(data)}")
    rows = np.frombuffer(data, np.uint8, num_rows * row_bytes, start).reshape(num_rows, row_bytes)
    return GgufTensor(name, shape, type_, rows)


def _check_apart(tensors: Sequence[TensorEntry], num_bytes: Mapping[str, int]) -> None:
    """Raises ValueError if two tensors share bytes."""
    ordered = sorted(tensors, key=lambda entry: entry.offset)
    for entry, following in pairwise(ordered):
        if entry.offset + num_bytes[entry.name] > following.offset:
            raise ValueError(f"tensors {entry.name} and {following.name} overlap")
