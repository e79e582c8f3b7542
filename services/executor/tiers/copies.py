"""Copies between blocks of the KV cache and memory of the host, beside steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pagewire.services.executor.device.copies import CudaCopies

logger = logging.getLogger(__name__)


class BlockCopies(Protocol):
    """Copies of whole blocks. Points in time are opaque: None, or an event of the device."""

    def bind(self, caches: Sequence[Tensor]) -> None:
        """Makes these the KV cache, and lets the one before go. caches: of each group, [num_blocks, ...]"""

    def now(self) -> Any:
        """Returns the time at which all steps that were launched are done. Called on the device thread."""

    def save(self, group: int, block: int, target: np.ndarray, after: Any) -> Any:
        """Starts to copy a block to memory of the host; returns when it will be done."""

    def load(self, group: int, block: int, source: np.ndarray, after: Any) -> Any:
        """Starts to fill a block with bytes of the host; returns when it will be done."""

    def hold_steps(self, until: Any) -> None:
        """Lets later steps begin only then. Called on the device thread."""

    def wait(self, until: Any) -> None:
        """Waits on the host."""


def rows_of(cache: Tensor) -> Tensor:
    """Returns the bytes of each block, uint8 [num_blocks, block_bytes]. cache: [num_blocks, ...]"""
    if cache.numel():
        return cache.view(torch.uint8).view(len(cache), cache[0].nbytes)
    return cache.new_empty(len(cache), 0, dtype=torch.uint8)


class HostCopies:
    """A KV cache in memory of the host: a copy is done when its call returns."""

    def __init__(self, caches: Sequence[Tensor]) -> None:
        self.bind(caches)

    def bind(self, caches: Sequence[Tensor]) -> None:
        self._blocks = [rows_of(cache).numpy() for cache in caches]

    def now(self) -> None: ...

    def save(self, group: int, block: int, target: np.ndarray, after: Any) -> None:
        np.copyto(target, self._blocks[group][block])

    def load(self, group: int, block: int, source: np.ndarray, after: Any) -> None:
        np.copyto(self._blocks[group][block], source)

    def hold_steps(self, until: Any) -> None: ...

    def wait(self, until: Any) -> None: ...


class DeviceCopies:
    """A KV cache on a GPU: copies run beside the steps."""

    def __init__(self, caches: Sequence[Tensor]) -> None:
        self._copies = CudaCopies(caches[0].device)
        self.bind(caches)

    def bind(self, caches: Sequence[Tensor]) -> None:
        self._blocks = [rows_of(cache) for cache in caches]

    def pin(self, memory: np.ndarray) -> None:
        """Keeps memory of the host in its place, so that copies of it run beside everything else."""
        if error := int(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)):
            logger.warning("copies of KV blocks wait for each other: CUDA cannot pin host memory (error %d)", error)

    def now(self) -> Any:
        return self._copies.now()

    def save(self, group: int, block: int, target: np.ndarray, after: Any) -> Any:
        return self._copies.copy(torch.from_numpy(target), self._blocks[group][block], after)

    def load(self, group: int, block: int, source: np.ndarray, after: Any) -> Any:
        return self._copies.copy(self._blocks[group][block], torch.from_numpy(source), after)

    def hold_steps(self, until: Any) -> None:
        self._copies.hold(until)

    def wait(self, until: Any) -> None:
        until.synchronize()
