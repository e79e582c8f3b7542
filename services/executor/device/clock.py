"""Times of a step: its waiting time, its duration, and the device's idle time before it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StageTimes:
    """Times of one step, in nanoseconds, by stage."""

    busy: tuple[int, ...]
    waited: tuple[int, ...]  # with a step available: for the previous stage, or for token ids
    late: int  # time in which the first stage had no step


class Clock:
    """Times of one step; all but the start are known after `wait_ns`."""

    def __init__(self, on_cuda: bool, received_ns: int) -> None:
        self._received_ns = received_ns
        self._started_ns = self._ended_ns = time.perf_counter_ns()
        self.queue_ns = self._started_ns - received_ns
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if on_cuda:
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True, blocking=True))
        self._is_launching = False

    def launching(self) -> None:
        """Marks that the host has prepared the step and the device begins. On a CPU, preparation is device work."""
        self._is_launching = True
        if self._events is not None:
            self._events[0].record()

    def launched(self) -> None:
        if not self._is_launching:
            self.launching()  # a step that only frees rows
        if self._events is not None:
            self._events[1].record()

    def wait_ns(self) -> int:
        """Waits until the device is done with the step."""
        if self._events is None:
            self._ended_ns = time.perf_counter_ns()
            return self._ended_ns - self._started_ns
        start, end = self._events
        wait_for(end)
        return int(start.elapsed_time(end) * 1e6)

    def idle_ns(self, previous: Clock) -> int:
        """Returns the time that the device was idle between the previous step and this one."""
        if self._events is None or previous._events is None:
            return max(0, self._received_ns - previous._ended_ns)
        return max(0, int(previous._events[1].elapsed_time(self._events[0]) * 1e6))


def wait_for(event: torch.cuda.Event) -> None:
    """Waits on any thread. Each begins on the first device, where another's event would make a context of its own."""
    with torch.cuda.device(event.device):
        event.synchronize()
