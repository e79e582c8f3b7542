"""Token embedding, which may share its weight with the output projection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.weights import Dense, NotLoaded, PackedDense, PackedGrouped, PackedWeight, Shard
from pagewire.services.executor.model_config import ModelLoadError


class Embedding:
    """`weight` is [vocab_size, hidden_size]; `project` is the tied output head."""

    __slots__ = ("dtype", "multiplies", "shards", "weight")

    def __init__(
        self, name: str, vocab_size: int, hidden_size: int, placement: Placement, *, projects: bool = False
    ) -> None:
        """projects: whether it is the output head too."""
        shard = Shard(placement.name(name), vocab_size, hidden_size, placement.format(name))
        self.shards: tuple[Shard, ...] = (shard,)
        self.dtype: torch.dtype = placement.dtype
        self.multiplies = projects
        self.weight: PackedWeight = (
            Dense(placement.empty(vocab_size, hidden_size))
            if shard.format is None
            else NotLoaded(vocab_size, hidden_size)
        )

    def __call__(self, input_ids: Tensor) -> Tensor:
        """input_ids [num_tokens] -> [num_tokens, hidden_size]"""
        weight = self.weight
        if isinstance(weight, PackedGrouped):
            return weight.embed(input_ids, self.dtype)
        if isinstance(weight, PackedDense):
            return weight.embed(input_ids)
        assert isinstance(weight, Dense)
        return functional.embedding(input_ids, weight.tensor)

    def project(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden_size] -> logits [S, vocab_size]"""
        return self.weight(hidden, None)

    @property
    def parts(self) -> tuple[PackedWeight, ...]:
        return (self.weight,)

    def install(self, parts: Sequence[PackedWeight]) -> None:
        (weight,) = parts
        name = self.shards[0].name
        if not isinstance(weight, Dense | PackedDense | PackedGrouped):
            raise ModelLoadError(
                f"module {name}: rows of an embedding cannot be looked up in int8 or fp8 without groups; leave it "
                "unquantized"
            )
        if isinstance(weight, PackedGrouped) and weight.permutation is not None:
            raise ModelLoadError(
                f"module {name}: rows of an embedding cannot be looked up where act-order permutes inputs; leave it "
                "unquantized, or quantize it without act-order"
            )
        self.weight = weight

    def load_targets(self) -> Iterator[tuple[str, Tensor]]:
        if isinstance(self.weight, Dense):
            yield f"{self.shards[0].name}.weight", self.weight.tensor
