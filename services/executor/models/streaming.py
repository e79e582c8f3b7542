"""Layers with weights in host memory, which are copied to the device ahead of their use.

Two buffers on the device hold the weights of two such layers, by turns. A buffer's next weights are copied while the
layers between are computed. The tensors of a layer lie in its buffer for good: CUDA graphs contain their addresses, and
the copies themselves, from page-locked memory that does not move either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

BUFFERS = 2

_Layer = TypeVar("_Layer")


class Copies(Protocol):
    """Copies to a device that run beside what it computes, one after the other."""

    def after_computing(self) -> None:
        """Makes copies that follow wait for all that has been launched so far."""

    def copy(self, target: Tensor, source: Tensor) -> Any:
        """Starts to copy; returns a mark of its end."""

    def wait(self, mark: Any) -> None:
        """Makes all that is launched from here on wait for the mark."""


class CudaCopies:
    """Copies on a separate stream, which become part of a graph while one is captured."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def after_computing(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)


@dataclass(frozen=True)
class StreamedWeights:
    """The weights of some layers, which take turns in the buffers in the order of the layers."""

    copies: Copies
    buffers: Sequence[Tensor]  # uint8, on the device
    host: Mapping[int, Tensor]  # uint8, by the layer's index, ascending; no longer than a buffer

    def arriving(self, layers: Sequence[_Layer]) -> Iterator[_Layer]:
        """Yields the layers in order, each when the device may be told to compute it; it must be told before the next
        is asked for."""
        order = list(self.host)
        self.copies.after_computing()  # the last step's layers, which used the buffers
        marks = {index: self._copy(turn, index) for turn, index in enumerate(order[:BUFFERS])}
        turn = 0
        for index, layer in enumerate(layers):
            if index not in self.host:
                yield layer
                continue
            self.copies.wait(marks.pop(index))
            yield layer
            following, turn = turn + BUFFERS, turn + 1
            # Only with a copy behind it: work that nothing waits for must not be left when a capture ends.
            if following < len(order):
                self.copies.after_computing()
                marks[order[following]] = self._copy(following, order[following])

    def _copy(self, turn: int, index: int) -> Any:
        source = self.host[index]
        return self.copies.copy(self.buffers[turn % BUFFERS][: len(source)], source)
