"""Token embedding, which may share its weight with the output projection."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.nn import functional

from services.executor.layers import ops
from services.executor.layers.placement import Placement


class Embedding:
    """`weight` is [vocab_size, hidden_size]; `project` is the tied output head."""

    __slots__ = ("weight",)

    def __init__(self, vocab_size: int, hidden_size: int, placement: Placement) -> None:
        self.weight = placement.empty(vocab_size, hidden_size)

    def __call__(self, input_ids: Tensor) -> Tensor:
        """input_ids [num_tokens] -> [num_tokens, hidden_size]"""
        return functional.embedding(input_ids, self.weight)

    def project(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden_size] -> logits [S, vocab_size]"""
        return ops.linear(hidden, self.weight, None)

    def load_targets(self, name: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{name}.weight", self.weight
