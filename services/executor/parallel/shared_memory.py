"""Memory that the ranks on one machine's CPUs share, and a communicator through it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from pagewire.kernels import ops
from pagewire.kernels.channel import channel_bytes, channel_ended, channel_waited, end_channel


class SharedMemory:
    """Channels (`pagewire.kernels.channel`) in anonymous memory: only a process with the descriptor can map it, and it
    is freed when its processes end."""

    def __init__(self, sizes: Sequence[int], descriptor: int | None = None) -> None:
        """sizes: ranks of each channel. descriptor: the memory that another process has made with the same sizes."""
        self._sizes = tuple(sizes)
        *self._starts, num_bytes = accumulate(map(channel_bytes, sizes), initial=0)
        if descriptor is None:
            descriptor = os.memfd_create("pagewire-ranks", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, num_bytes)
        self.descriptor = descriptor
        self._memory = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)

    def channel(self, index: int, rank: int) -> Channel:
        return Channel(self._part(index), rank, self._sizes[index])

    def end(self) -> None:
        """Ends the waiting of all ranks. Called on any thread."""
        for index in range(len(self._sizes)):
            end_channel(self._part(index))

    @property
    def has_ended(self) -> bool:
        return any(channel_ended(self._part(index)) for index in range(len(self._sizes)))

    def _part(self, index: int) -> Tensor:
        start = self._starts[index]
        return self._memory[start : start + channel_bytes(self._sizes[index])]


class Channel:
    """A `Communicator`. Its results are undefined once its memory `has_ended`."""

    def __init__(self, memory: Tensor, rank: int, size: int) -> None:
        """memory: uint8 [channel_bytes(size)], see `pagewire.kernels.channel`"""
        self.rank, self.size = rank, size
        self._memory = memory

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        ops.all_reduce(x, self._memory, self.rank, self.size)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return ops.all_gather(x, self._memory, self.rank, self.size)

    def all_to_all(self, x: Tensor, rows: Tensor, starts: Tensor) -> None:
        ops.all_to_all(x, rows, starts, self._memory, self.rank, self.size)

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        x = x.contiguous()
        ops.broadcast(x, root, self._memory, self.rank, self.size)
        return x

    @property
    def waited(self) -> float:
        """Seconds that this rank has waited for others."""
        return channel_waited(self._memory, self.rank)
