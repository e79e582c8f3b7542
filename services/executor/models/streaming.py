"""Layers with weights in host memory, which are copied to the device ahead of their use.

Two buffers on the device hold the weights of two such layers, by turns. A buffer's next weights are copied while the
layers between are computed. The tensors of a layer lie in its buffer for good: CUDA graphs contain their addresses, and
the copies themselves, from page-locked memory that does not move either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from pagewire.services.executor.device.copies import Copies

BUFFERS = 2

_Layer = TypeVar("_Layer")


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
        after = self.copies.now()  # the last step's layers, which used the buffers
        marks = {index: self._copy(turn, index, after) for turn, index in enumerate(order[:BUFFERS])}
        turn = 0
        for index, layer in enumerate(layers):
            if index not in self.host:
                yield layer
                continue
            self.copies.hold(marks.pop(index))
            yield layer
            following, turn = turn + BUFFERS, turn + 1
            # Only with a copy behind it: work that nothing waits for must not be left when a capture ends.
            if following < len(order):
                marks[order[following]] = self._copy(following, order[following], self.copies.now())

    def _copy(self, turn: int, index: int, after: Any) -> Any:
        source = self.host[index]
        return self.copies.copy(self.buffers[turn % BUFFERS][: len(source)], source, after)
