"""Results of steps on their way to the host, and a check that rides along with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pagewire.services.executor.device.errors import DeviceError
from pagewire.services.executor.device.events import wait_for
from pagewire.services.executor.device.upload import host_memory

CHECKED_EVERY = 1000  # fetches


@dataclass
class PendingResults:
    """Results of a step on their way to the host."""

    _host: dict[str, Tensor]
    _copied: torch.cuda.Event | None = None
    # Device memory must outlive the copy that reads it.
    _device: dict[str, Tensor] | None = field(default=None, repr=False)
    _num_left: Tensor | None = None  # counters of split kernels that are not 0

    def wait(self) -> dict[str, np.ndarray]:
        """Returns the results, on any thread. Raises DeviceError if later steps may be wrong."""
        if self._copied is not None:
            wait_for(self._copied)
            self._device = None
        if self._num_left is not None and (num_left := int(self._num_left)):
            raise DeviceError(
                f"{num_left} counters of kernels that split their work are not 0 between two steps, so later results "
                "would be wrong; the executor has to restart"
            )
        return {name: tensor.numpy() for name, tensor in self._host.items()}


class ResultCopies:
    """Fetches results from a device. On CUDA a stream of their own carries them to pinned memory, behind the step and
    beside the next one."""

    def __init__(self, device: torch.device, num_left: Callable[[], Tensor | None] | None = None) -> None:
        """num_left: returns, on the device and behind what was launched, how many counters of split kernels are not 0;
        by default of CUDA's kernels."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._num_left = num_left or (_of_cuda_kernels(device) if device.type == "cuda" else lambda: None)
        self._num_fetched = 0

    def fetch(self, tensors: dict[str, Tensor]) -> PendingResults:
        """Begins to copy tensors. Now and then the counters of split kernels come along."""
        self._num_fetched += 1
        num_left = self._num_left() if self._num_fetched % CHECKED_EVERY == 0 else None
        if self._stream is None:
            return PendingResults(tensors, _num_left=num_left)
        self._stream.wait_stream(torch.cuda.current_stream())
        host, fetched = {}, tensors if num_left is None else {**tensors, "num_left": num_left}
        with torch.cuda.stream(self._stream):
            for name, tensor in fetched.items():
                host[name] = host_memory(tuple(tensor.shape), tensor.dtype, tensor.device)
                host[name].copy_(tensor, non_blocking=True)
                tensor.record_stream(self._stream)
            # A blocking event sleeps in synchronize() where the default one would spin.
            copied = torch.cuda.Event(blocking=True)
            copied.record(self._stream)
        return PendingResults(host, copied, fetched, host.pop("num_left", None))


def _of_cuda_kernels(device: torch.device) -> Callable[[], Tensor | None]:
    from pagewire.kernels.triton.common.arrivals import num_left_counting  # without CUDA there may be no Triton

    current = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
    return lambda: num_left_counting(current)
