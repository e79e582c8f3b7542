"""Copies between a device and the host that run beside what the device computes."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Copies(Protocol):
    """Copies that run one after the other. Points in time are opaque."""

    def now(self) -> Any:
        """Returns the time at which all that has been launched so far is done."""

    def copy(self, target: Tensor, source: Tensor, after: Any) -> Any:
        """Starts to copy at that time; returns when it will be done."""

    def hold(self, until: Any) -> None:
        """Makes all that is launched from here on wait until then."""


class CudaCopies:
    """Copies on a stream of their own, which become part of a graph while one is captured."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(self, target: Tensor, source: Tensor, after: torch.cuda.Event) -> torch.cuda.Event:
        done = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            done.record(self._stream)
        return done

    def hold(self, until: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(until)
