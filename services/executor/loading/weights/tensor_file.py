"""A safetensors file with tensors that kernels can use as mapped: each begins at a multiple of 64 bytes.

safetensors itself aligns a tensor to the size of its elements, and allows no gaps. So each is stored as bytes, padded
to a multiple of 64; its dtype and shape are in the metadata. The metadata has a checksum, the tensors have none:
reading them all is what mapping avoids.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

_ALIGNMENT = 64  # bytes: a cache line, and the widest vector register
_METADATA, _CHECKSUM = "pagewire", "sha256"


class TensorFileError(Exception):
    """The file cannot be used; the message says why."""


def write(path: Path, tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> None:
    """Writes all to `path`, one tensor in host memory at a time. content: anything JSON. Raises OSError."""
    specs = {name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()}
    metadata = json.dumps({"tensors": specs, "content": content})
    header: dict[str, Any] = {"__metadata__": {_METADATA: metadata, _CHECKSUM: _checksum(metadata)}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + _padded(tensor.nbytes)
        header[name] = {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (_padded(8 + len(encoded)) - 8 - len(encoded))
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for tensor in tensors.values():
            file.write(as_bytes(tensor).cpu().numpy().data)
            file.write(bytes(_padded(tensor.nbytes) - tensor.nbytes))
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> tuple[dict[str, Tensor], Any]:
    """Returns (tensors, content). The tensors are views of the mapped file, which is read when they are; writing to
    them changes this process' copy. Raises FileNotFoundError, OSError, TensorFileError."""
    try:
        file = safe_open(path, framework="pt", device="cpu")
        metadata = file.metadata() or {}
        if metadata[_CHECKSUM] != _checksum(metadata[_METADATA]):
            raise ValueError("the checksum of its header is wrong")
        stored = json.loads(metadata[_METADATA])
        tensors = {
            name: _view(file.get_tensor(name), dtype, shape) for name, (dtype, shape) in stored["tensors"].items()
        }
        return tensors, stored["content"]
    except FileNotFoundError:
        raise
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise TensorFileError(f"the file is damaged ({error})") from error


def as_bytes(tensor: Tensor) -> Tensor:
    """uint8 [nbytes], a view of a contiguous tensor"""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _view(stored: Tensor, dtype_name: str, shape: list[int]) -> Tensor:
    dtype = getattr(torch, dtype_name)
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes > len(stored):
        raise ValueError(f"{len(stored)} bytes where {num_bytes} are needed")
    return stored[:num_bytes].view(dtype).view(shape)


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
