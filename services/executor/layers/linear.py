"""Linear layers, dense or quantized."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from pagewire.kernels import ops
from pagewire.services.executor.layers.norm import RMSNorm
from pagewire.services.executor.layers.parts import StoredPart, indices
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.shares import even_share, padded_share, share_size
from pagewire.services.executor.layers.sums import Exchange, share_of_inputs
from pagewire.services.executor.layers.weight_format import output_unit
from pagewire.services.executor.layers.weights import (
    Dense,
    GatedWeight,
    LayerAdapters,
    NormedWeight,
    NotLoaded,
    PackedWeight,
    Shard,
    Stacked,
    stored_parts,
)
from pagewire.services.executor.parallel.communicator import Communicator


class StreamUpdate(NamedTuple):
    """The residual stream before and after attention, or before and after the MLP: [num_tokens, hidden_size] each."""

    residual: Tensor
    updated: Tensor


class Split(Enum):
    """The split of a linear layer among ranks."""

    NONE = "none"  # each rank has all of it, except rows that it does not need
    OUTPUTS = "outputs"  # each computes its share of each projection's outputs
    INPUTS = "inputs"  # each multiplies its share of the inputs; the products are summed
    GATHERED = "gathered"  # like OUTPUTS, then all outputs are gathered on all ranks


class Linear:
    """`x @ weight.T + bias` for one or several checkpoint projections that read the same input.

    `shards` maps checkpoint names to output sizes, in the order in which they are stacked in `weight`:
    {"q_proj": 576, "k_proj": 192, "v_proj": 192} makes one weight [960, in_features].
    """

    __slots__ = ("_dtype", "_exchange", "_results", "adapters", "bias", "input_dtype", "shards", "transposed", "weight")

    multiplies = True

    def __init__(
        self,
        in_features: int,
        shards: Mapping[str, int],
        placement: Placement,
        *,
        bias: bool,
        rows: Mapping[str, Tensor | range | None] | None = None,
        transposed: bool = False,
        split: Split = Split.NONE,
        result_dtype: torch.dtype | None = None,
    ) -> None:
        """in_features, shards: the checkpoint's, regardless of the rank's share.

        rows: by checkpoint name, the rows of projections of which it has some only, or in another order (`row_order`).
        If ranks split outputs, rows are the rank's outputs; by default ranks have equal shares.

        transposed: a dense checkpoint has weights as [in_features, out_features].

        result_dtype: by default the placement's.
        """
        self._dtype, self.input_dtype = placement.dtype, placement.input_dtype
        result_dtype = result_dtype or placement.result_dtype
        self._results = None if result_dtype is placement.dtype else result_dtype
        self._exchange: Exchange | None = None
        self.adapters: LayerAdapters | None = None
        chosen = {name: indices(which) for name, which in (rows or {}).items() if which is not None}
        inputs = None
        ranks = placement.tensor
        if ranks.size > 1 and split is Split.INPUTS:
            inputs = share_of_inputs(in_features, shards, placement)
            split = Split.GATHERED if inputs is None else split
            self._exchange = Exchange(ranks, gathers_inputs=inputs is None, sums=inputs is not None)
        if ranks.size > 1 and split is Split.GATHERED:
            ((name, size),) = shards.items()
            unit = output_unit(placement.format(name), size, in_features)
            chosen[name] = indices(padded_share(f"the outputs of {placement.name(name)}", size, ranks, unit))
            self._exchange = self._exchange or Exchange(ranks)
            self._exchange.num_outputs, self._exchange.share = size, share_size(size, ranks.size, unit)
        if ranks.size > 1 and split is Split.OUTPUTS:
            for name, size in shards.items():
                if name not in chosen:
                    unit = output_unit(placement.format(name), size, in_features)
                    share = even_share(f"the outputs of {placement.name(name)}", size, ranks, unit)
                    chosen[name] = indices(share)
        self.shards = tuple(
            Shard(placement.name(name), size, in_features, placement.format(name), bias, chosen.get(name), inputs)
            for name, size in shards.items()
        )
        sizes = sum(shard.num_outputs for shard in self.shards), self.shards[0].num_inputs
        self.weight: PackedWeight = (
            Dense(placement.empty(*sizes)) if all(shard.format is None for shard in self.shards) else NotLoaded(*sizes)
        )
        self.bias = replace(placement, dtype=result_dtype).empty(sizes[0]) if bias else None
        self.transposed = transposed

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, inputs of the rank] -> [num_tokens, outputs of the rank]"""
        if x.dtype is not self.input_dtype and x.dtype is not self._dtype:
            x = x.to(self._dtype)
        if self._exchange is None:
            return self._product(x, self.bias)
        return self._exchange(self._product, x, self.bias)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        product = self.weight(x, bias, self._results)
        if self.adapters is not None:
            self.adapters.add(product, x)
        return product

    def gated(self, x: Tensor) -> Tensor:
        """`silu_and_mul` of the product, [num_tokens, outputs of the rank / 2], as products take it"""
        is_plain = self._exchange is None and (self.adapters is None or not self.adapters.are_used)
        if is_plain and isinstance(self.weight, GatedWeight):
            return self.weight.gated(x.to(self.input_dtype), self.bias, self._results)
        return ops.silu_and_mul(self(x), self.input_dtype)

    @property
    def takes_norm(self) -> bool:
        """Returns whether `after_norm` may be called; this is known once the weight is installed."""
        return self._exchange is None and isinstance(self.weight, NormedWeight) and self.weight.takes_norm

    def after_norm(self, norm: RMSNorm, x: Tensor, stream: StreamUpdate, *, gated: bool = False) -> Tensor:
        """Returns the product of `norm.add(x, stream.residual)`, except that the sum becomes `stream.updated`.

        gated: return `silu_and_mul` of it.
        """
        assert isinstance(self.weight, NormedWeight)
        return self.weight.after_norm(x, *stream, norm.weight, norm.eps, self.bias, gated)

    @property
    def parts(self) -> tuple[PackedWeight, ...]:
        return self.weight.parts if isinstance(self.weight, Stacked) else (self.weight,)

    @property
    def summing_ranks(self) -> Communicator | None:
        """Implements `sums.Summed`."""
        return self._exchange.ranks if self._exchange is not None and self._exchange.sums else None

    def leave_sum(self) -> None:
        assert self._exchange is not None
        self._exchange.leaves_sum = True

    def install(self, parts: Sequence[PackedWeight]) -> None:
        self.weight = parts[0] if len(parts) == 1 else Stacked(parts)

    def load_targets(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (checkpoint tensor name, the view it is written to)."""
        start = 0
        for shard in self.shards:
            stop = start + shard.num_outputs
            if isinstance(self.weight, Dense):
                weight = self.weight.tensor[start:stop]
                yield f"{shard.name}.weight", weight.t() if self.transposed else weight
            if self.bias is not None:
                yield f"{shard.name}.bias", self.bias[start:stop]
            start = stop

    def stored_parts(self) -> Iterator[tuple[str, StoredPart]]:
        return stored_parts(self.shards, transposed=self.transposed)


def output_head(hidden_size: int, sizes: Mapping[str, int], placement: Placement, *, bias: bool = False) -> Linear:
    """Returns the projection to logits, which are fp32 on every device: in bf16, near tokens would often tie."""
    return Linear(hidden_size, sizes, placement, bias=bias, split=Split.GATHERED, result_dtype=torch.float32)
