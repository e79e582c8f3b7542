"""Token embedding, which may share its weight with the output projection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.parts import StoredPart, indices
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.shares import padded_share, share_size
from pagewire.services.executor.layers.sums import Exchange
from pagewire.services.executor.layers.weights import (
    Dense,
    NotLoaded,
    PackedDense,
    PackedGrouped,
    PackedWeight,
    Shard,
    stored_parts,
)


class Embedding:
    """`weight` is [vocab_size, hidden_size], or a rank's share of its rows; `project` is the tied output head."""

    __slots__ = ("_exchange", "_first", "dtype", "multiplies", "result_dtype", "shards", "weight")

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        placement: Placement,
        *,
        projects: bool = False,
        split: bool = False,
    ) -> None:
        """projects: whether it is also the output head. split: whether the rows are divided among ranks."""
        self._exchange: Exchange | None = None
        rows, self._first = None, 0
        if split and placement.tensor.size > 1:
            share = padded_share("vocab_size", vocab_size, placement.tensor)
            rows, self._first = indices(share), share.start
            self._exchange = Exchange(placement.tensor)
            self._exchange.num_outputs = vocab_size
            self._exchange.share = share_size(vocab_size, placement.tensor.size)
        shard = Shard(placement.name(name), vocab_size, hidden_size, placement.format(name), rows=rows)
        self.shards: tuple[Shard, ...] = (shard,)
        self.dtype: torch.dtype = placement.dtype
        self.result_dtype: torch.dtype = placement.result_dtype
        self.multiplies = projects
        self.weight: PackedWeight = (
            Dense(placement.empty(shard.num_outputs, hidden_size))
            if shard.format is None
            else NotLoaded(shard.num_outputs, hidden_size)
        )

    def __call__(self, input_ids: Tensor) -> Tensor:
        """input_ids [num_tokens] -> [num_tokens, hidden_size]"""
        if self._exchange is None:
            return self._look_up(input_ids)
        rows = input_ids - self._first
        elsewhere = (rows < 0) | (rows >= self.shards[0].num_outputs)
        found = self._look_up(rows.masked_fill(elsewhere, 0))
        return self._exchange.ranks.all_reduce(found.masked_fill_(elsewhere.unsqueeze(1), 0))

    def _look_up(self, rows: Tensor) -> Tensor:
        weight = self.weight
        if isinstance(weight, PackedGrouped):
            return weight.embed(rows, self.result_dtype)
        if isinstance(weight, PackedDense):
            return weight.embed(rows).to(self.result_dtype)
        assert isinstance(weight, Dense)
        return functional.embedding(rows, weight.tensor).to(self.result_dtype)

    def project(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden_size] -> logits [S, vocab_size], fp32"""
        logits = self.weight(hidden, None, None if self.dtype is torch.float32 else torch.float32)
        return logits if self._exchange is None else self._exchange.gathered(logits)

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

    def stored_parts(self) -> Iterator[tuple[str, StoredPart]]:
        return stored_parts(self.shards)
