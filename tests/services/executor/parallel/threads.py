"""Ranks as threads of one process: what the ranks of a group compute, without processes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError
from typing import TypeVar

import torch
from torch import Tensor

from pagewire.services.executor.parallel.communicator import Communicator

T = TypeVar("T")


class _Meeting:
    """Where all ranks put a tensor, and see those of the others."""

    def __init__(self, size: int) -> None:
        self.barrier = Barrier(size, timeout=60)
        self.slots: list[Tensor | None] = [None] * size

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.slots[rank] = x
        self.barrier.wait()
        found = [slot.clone() for slot in self.slots if slot is not None]
        self.barrier.wait()
        return found


class ThreadCommunicator:
    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.size = size
        self._meeting = meeting

    def all_reduce(self, x: Tensor) -> Tensor:
        first, *others = self._meeting.exchange(self.rank, x)
        for other in others:
            first += other
        return first

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._meeting.exchange(self.rank, x), dim=1)

    def all_to_all(self, x: Tensor, rows: Tensor, starts: Tensor) -> None:
        bounds = starts.tolist()
        for by, theirs in enumerate(self._meeting.exchange(self.rank, x)):
            edge = self.rank * self.size + by
            chosen = rows[bounds[edge] : bounds[edge + 1]]
            x[chosen] = theirs[chosen]

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        return self._meeting.exchange(self.rank, x)[root]


def on_ranks(size: int, function: Callable[[Communicator], T]) -> list[T]:
    """Returns the result of the function on each rank. Raises the first error that is not only a missing rank."""
    meeting = _Meeting(size)

    def run(rank: int) -> T:
        try:
            return function(ThreadCommunicator(rank, size, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        running = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in running if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, BrokenBarrierError)), errors[0])
    return [future.result() for future in running]
