"""Results of steps on their way to the host, and a check that rides along with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pagewire.kernels import backends
from pagewire.services.executor.device.clock import wait_for
from pagewire.services.executor.device.errors import DeviceError
from pagewire.services.executor.device.upload import host_memory

CHECKED_EVERY, _NUM_LEFT = 1000, "counters that are not 0"


@dataclass
class PendingResults:
    """Results of a step on their way to the host."""

    _host: dict[str, Tensor]
    _copied: torch.cuda.Event | None = None
    # Device memory must outlive the copy that reads it.
    _device: dict[str, Tensor] | None = field(default=None, repr=False)

    def wait(self) -> dict[str, np.ndarray]:
        """Returns the results, on any thread. Raises DeviceError if later steps may be wrong."""
        if self._copied is not None:
            wait_for(self._copied)
            self._device = None
        results = {name: tensor.numpy() for name, tensor in self._host.items()}
        if num_left := int(results.pop(_NUM_LEFT, 0)):
            raise DeviceError(f"kernels left {num_left} counters of split work behind, so later results would be wrong")
        return results


class ResultCopies:
    """Fetches results. On CUDA a stream of their own carries them to pinned memory, beside the next step."""

    def __init__(self, device: torch.device, num_left: Callable[[], Tensor | None] | None = None) -> None:
        """num_left: returns how many counters of split kernels are not 0; by default of CUDA's."""
        on_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_cuda else None
        self._num_left = num_left or (backends.find("cuda", "common", "num_left_counting") if on_cuda else lambda: None)
        self._num_fetched = 0

    def fetch(self, tensors: dict[str, Tensor]) -> PendingResults:
        """Begins to copy tensors. Now and then the counters of split kernels come along."""
        self._num_fetched += 1
        if self._num_fetched % CHECKED_EVERY == 0 and (num_left := self._num_left()) is not None:
            tensors = {**tensors, _NUM_LEFT: num_left}
        if self._stream is None:
            return PendingResults(tensors)
        self._stream.wait_stream(torch.cuda.current_stream())
        host = {}
        with torch.cuda.stream(self._stream):
            for name, tensor in tensors.items():
                host[name] = host_memory(tuple(tensor.shape), tensor.dtype, tensor.device)
                host[name].copy_(tensor, non_blocking=True)
                tensor.record_stream(self._stream)
            # A blocking event sleeps in synchronize() where the default one would spin.
            copied = torch.cuda.Event(blocking=True)
            copied.record(self._stream)
        return PendingResults(host, copied, tensors)
