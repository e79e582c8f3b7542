"""Copies to the device, for which no step waits."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16
# Pinned memory comes in powers of two: torch's allocator hands out again what was used in the same size, and to ask the
# driver for more holds up the device (`start.host_memory`).
SMALLEST_BYTES = 1 << 9


def host_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns uninitialized memory for a copy to or from a device, pinned for CUDA."""
    is_pinned = device.type == "cuda" and torch.cuda.is_initialized()  # a compiler's stand-in has no driver
    num_bytes = math.prod(shape) * dtype.itemsize
    size = max(SMALLEST_BYTES, 1 << max(num_bytes - 1, 0).bit_length())
    return torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)[:num_bytes].view(dtype).view(shape)


def upload(device: torch.device, arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """The arrays as tensors on `device`, in one copy; each keeps its dtype and shape.

    On the CPU the tensors share the arrays' memory, so the caller must not write to them afterwards. On CUDA every
    call fills a new pinned buffer: a copy in flight is never overwritten (torch's pinned allocator reuses the
    memory only after the copy is done).
    """
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    offsets, size = {}, 0
    for name, array in arrays.items():
        offsets[name] = size
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    staged = host_memory((size,), torch.uint8, device)
    staging = staged.numpy()
    for name, array in arrays.items():
        begin = offsets[name]
        staging[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    packed = staged.to(device, non_blocking=True)
    tensors = {}
    for name, array in arrays.items():
        begin = offsets[name]
        dtype = torch.from_numpy(array[:0]).dtype
        tensors[name] = packed[begin : begin + array.nbytes].view(dtype).view(array.shape)
    return tensors


def upload_into(target: Tensor, array: np.ndarray) -> None:
    """Copies the array to `target`, of its shape and dtype, on CUDA; it may be changed as soon as this returns."""
    # A new pinned buffer for each copy, as in `upload`.
    staged = host_memory(tuple(target.shape), target.dtype, target.device).copy_(torch.from_numpy(array))
    target.copy_(staged, non_blocking=True)
