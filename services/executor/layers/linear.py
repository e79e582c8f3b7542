"""Linear layers, dense or quantized."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.weights import Dense, NotLoaded, PackedWeight, Shard, Stacked


class Linear:
    """`x @ weight.T + bias` for one or several checkpoint projections that read the same input.

    `shards` maps checkpoint names to output sizes, in the order in which they are stacked in `weight`:
    {"q_proj": 576, "k_proj": 192, "v_proj": 192} makes one weight [960, in_features].
    """

    __slots__ = ("bias", "shards", "transposed", "weight")

    multiplies = True

    def __init__(
        self,
        in_features: int,
        shards: Mapping[str, int],
        placement: Placement,
        *,
        bias: bool,
        rows: Mapping[str, Tensor] | None = None,
        transposed: bool = False,
    ) -> None:
        """rows: by checkpoint name, of projections whose rows the checkpoint has in another order (`row_order`).

        transposed: a dense checkpoint has weights as [in_features, out_features].
        """
        out_features = sum(shards.values())
        rows = rows or {}
        self.shards = tuple(
            Shard(placement.name(name), size, in_features, placement.format(name), bias, rows.get(name))
            for name, size in shards.items()
        )
        self.weight: PackedWeight = (
            Dense(placement.empty(out_features, in_features))
            if all(shard.format is None for shard in self.shards)
            else NotLoaded(out_features, in_features)
        )
        self.bias = placement.empty(out_features) if bias else None
        self.transposed = transposed

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, in_features] -> [num_tokens, out_features]"""
        return self.weight(x, self.bias)

    @property
    def parts(self) -> tuple[PackedWeight, ...]:
        return self.weight.parts if isinstance(self.weight, Stacked) else (self.weight,)

    def install(self, parts: Sequence[PackedWeight]) -> None:
        self.weight = parts[0] if len(parts) == 1 else Stacked(parts)

    def load_targets(self) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint tensor name, the view it is written to)"""
        start = 0
        for shard in self.shards:
            stop = start + shard.out_features
            if isinstance(self.weight, Dense):
                weight = self.weight.tensor[start:stop]
                yield f"{shard.name}.weight", weight.t() if self.transposed else weight
            if self.bias is not None:
                yield f"{shard.name}.bias", self.bias[start:stop]
            start = stop
