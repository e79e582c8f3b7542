"""Linear layers. Quantized execution replaces this class and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from services.executor.layers import ops
from services.executor.layers.placement import Placement


class Linear:
    """`x @ weight.T + bias` for one or several checkpoint projections that read the same input.

    `shards` maps checkpoint names to output sizes, in the order in which they are stacked in `weight`:
    {"q_proj": 576, "k_proj": 192, "v_proj": 192} makes one weight [960, in_features].
    """

    __slots__ = ("bias", "shards", "weight")

    def __init__(self, in_features: int, shards: Mapping[str, int], placement: Placement, *, bias: bool) -> None:
        out_features = sum(shards.values())
        self.shards = shards
        self.weight = placement.empty(out_features, in_features)
        self.bias = placement.empty(out_features) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, in_features] -> [num_tokens, out_features]"""
        return ops.linear(x, self.weight, self.bias)

    def load_targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint tensor name, the view it is written to); `prefix` ends with a dot or is empty."""
        start = 0
        for name, size in self.shards.items():
            yield f"{prefix}{name}.weight", self.weight[start : start + size]
            if self.bias is not None:
                yield f"{prefix}{name}.bias", self.bias[start : start + size]
            start += size
