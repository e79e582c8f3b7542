"""A pipe between two ranks through torch.distributed: gloo between the CPUs of machines, NCCL between GPUs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pagewire.services.executor.parallel.pipe import PeerLost


class TorchPipe:
    """A `Pipe` of two ranks with a separate process group. On CUDA, calls only launch, on the current stream, and no
    numbers are sent: the host's times would not be the device's."""

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        """peer: the rank of the other end, among all ranks."""
        self._group, self._peer = group, peer
        # gloo reads the memory only when the other end receives.
        self._under_way: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, numbers: Sequence[int], tensors: Sequence[Tensor]) -> None:
        while self._under_way and self._under_way[0][0].is_completed():
            self._under_way.popleft()
        on_cuda = bool(tensors) and tensors[0].is_cuda
        header = [torch.tensor(numbers, dtype=torch.int64)] if numbers and not on_cuda else []
        for tensor in [*header, *(tensor.clone() for tensor in tensors)]:
            try:
                work = dist.isend(tensor, dst=self._peer, group=self._group)
            except RuntimeError as error:
                raise PeerLost(str(error)) from error
            assert work is not None
            self._under_way.append((work, tensor))

    def receive(self, tensors: Sequence[Tensor], num_numbers: int = 0) -> tuple[int, ...]:
        on_cuda = bool(tensors) and tensors[0].is_cuda
        numbers = torch.zeros(num_numbers, dtype=torch.int64)
        try:
            for tensor in [*([numbers] if num_numbers and not on_cuda else []), *tensors]:
                if tensor.numel():
                    dist.recv(tensor, src=self._peer, group=self._group)
        except RuntimeError as error:
            raise PeerLost(str(error)) from error
        return tuple(numbers.tolist())
