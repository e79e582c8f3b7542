"""Sinks of attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pagewire.services.executor.layers.parts import StoredPart
from pagewire.services.executor.layers.placement import Placement


class Sinks:
    """A learned score per head for a key without a value that every query sees (GPT-OSS's `sinks`)."""

    __slots__ = ("heads", "name", "num_heads", "scores")

    def __init__(self, name: str, num_heads: int, placement: Placement, heads: range | None = None) -> None:
        """heads: the rank's heads; None: all."""
        self.name = placement.name(name)
        self.heads = range(num_heads) if heads is None else heads
        self.num_heads = num_heads
        self.scores = torch.empty(len(self.heads), dtype=torch.float32, device=placement.device)

    def load_targets(self) -> Iterator[tuple[str, Tensor]]:
        yield self.name, self.scores

    def stored_parts(self) -> Iterator[tuple[str, StoredPart]]:
        yield self.name, StoredPart((self.num_heads,), (self.heads,))
