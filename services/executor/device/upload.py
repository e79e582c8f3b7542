"""Copies between host and device, for which no step waits."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16


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
    pinned = torch.empty(max(size, 1), dtype=torch.uint8, pin_memory=True)
    staging = pinned.numpy()
    for name, array in arrays.items():
        begin = offsets[name]
        staging[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    packed = pinned.to(device, non_blocking=True)
    tensors = {}
    for name, array in arrays.items():
        begin = offsets[name]
        dtype = torch.from_numpy(array[:0]).dtype
        tensors[name] = packed[begin : begin + array.nbytes].view(dtype).view(array.shape)
    return tensors


def upload_into(target: Tensor, array: np.ndarray) -> None:
    """Copies the array to `target`, of its shape and dtype, on CUDA; it may be changed as soon as this returns."""
    # A new pinned buffer for each copy, as in `upload`.
    pinned = torch.empty(target.shape, dtype=target.dtype, pin_memory=target.is_cuda).copy_(torch.from_numpy(array))
    target.copy_(pinned, non_blocking=True)


@dataclass
class PendingResults:
    """Results of a step on their way to the host.

    On CUDA a stream of their own carries them to pinned memory, behind the step and beside the next one.
    """

    _host: dict[str, torch.Tensor]
    _copied: torch.cuda.Event | None
    # Device memory must outlive the copy that reads it.
    _device: dict[str, torch.Tensor] | None = field(repr=False)

    @classmethod
    def fetch(cls, tensors: dict[str, torch.Tensor], copy_stream: torch.cuda.Stream | None) -> PendingResults:
        if copy_stream is None:
            return cls(tensors, None, None)
        copy_stream.wait_stream(torch.cuda.current_stream())
        host = {}
        with torch.cuda.stream(copy_stream):
            for name, tensor in tensors.items():
                host[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                host[name].copy_(tensor, non_blocking=True)
                tensor.record_stream(copy_stream)
            # A blocking event sleeps in synchronize() where the default one would spin.
            copied = torch.cuda.Event(blocking=True)
            copied.record(copy_stream)
        return cls(host, copied, tensors)

    def wait(self) -> dict[str, np.ndarray]:
        if self._copied is not None:
            self._copied.synchronize()
            self._device = None
        return {name: tensor.numpy() for name, tensor in self._host.items()}
