"""Weights on their way to a device: host buffers that reader threads fill while the device copies others.

Buffers are page-locked, so the device reads them on its own, and are reused: for a model of any size, the host holds
only a few buffers. Reading, converting and copying overlap, with each buffer in one of these phases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor


class Transfer(Protocol):
    """Copies from one buffer to the device."""

    def start(self, staged: Tensor, target: Tensor) -> None:
        """Begins to copy; `staged` (of the same shape, perhaps another dtype) must not change until `wait()`."""

    def wait(self) -> None:
        """Returns when the last copy is done."""


class CudaTransfer:
    """A separate stream per buffer: copies of several buffers queue on the device, and none waits for another."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))  # which may still use the targets' memory

    def start(self, staged: Tensor, target: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            if staged.dtype != target.dtype:
                staged = staged.to(target.device, non_blocking=True)  # converted there, in the copy below
            target.copy_(staged, non_blocking=True)

    def wait(self) -> None:
        self._stream.synchronize()


class Staging:
    """A pool of buffers, each with its transfer. `write` may be called from as many threads as there are buffers."""

    def __init__(self, buffers: Iterable[tuple[Tensor, Transfer]]) -> None:
        """buffers: uint8 [buffer_bytes], all of the same size."""
        self._buffers = list(buffers)
        self.buffer_bytes = self._buffers[0][0].nbytes
        self._free: SimpleQueue[tuple[Tensor, Transfer]] = SimpleQueue()
        for buffer in self._buffers:
            self._free.put(buffer)

    def write(self, target: Tensor, dtype: torch.dtype, read: Callable[[Tensor], None]) -> None:
        """Has `read` fill a host tensor of target's shape and of `dtype`, then starts to copy it to `target`.

        Takes the buffer that was returned first: its copy is the most likely to be done.
        """
        buffer, transfer = self._free.get()
        try:
            transfer.wait()
            staged = buffer[: math.prod(target.shape) * dtype.itemsize].view(dtype).view(target.shape)
            read(staged)
            transfer.start(staged, target)
        finally:
            self._free.put((buffer, transfer))

    def finish(self) -> None:
        """Returns when everything has arrived."""
        for _, transfer in self._buffers:
            transfer.wait()


def cuda_staging(device: torch.device, num_buffers: int, buffer_bytes: int) -> Staging:
    return Staging(
        (torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=True), CudaTransfer(device))
        for _ in range(num_buffers)
    )
