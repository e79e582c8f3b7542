"""Stages of a pipeline: the layers of a model, divided among ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Stage:
    """One part of a pipeline. The first has the embedding, the last has the final norm and the head."""

    index: int = 0
    count: int = 1
    first_layer: int = 0
    end_layer: int | None = None  # None: all that follow

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def layers(self, num_layers: int) -> range:
        """Returns the indices of its layers."""
        return range(num_layers)[self.first_layer : self.end_layer]


WHOLE = Stage()


def divide(layer_costs: Sequence[float], head_cost: float, count: int) -> list[Stage]:
    """Returns stages of at least one layer each. The slowest, which determines the rate, is as fast as possible.

    layer_costs: cost of each layer, in any unit. head_cost: cost of the last stage in addition to its layers.
    """
    num_layers = len(layer_costs)

    @cache
    def best(start: int, left: int) -> tuple[float, int]:
        """Returns the cost of the slowest of `left` stages for the layers from `start` on, and the end of the first."""
        if left == 1:
            return sum(layer_costs[start:]) + head_cost, num_layers
        ends = range(start + 1, num_layers - left + 2)
        return min((max(sum(layer_costs[start:end]), best(end, left - 1)[0]), end) for end in ends)

    stages, start = [], 0
    for index in range(count):
        end = best(start, count - index)[1]
        stages.append(Stage(index, count, start, end))
        start = end
    return stages
