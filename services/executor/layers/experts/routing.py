"""Routing: the choice of experts for the tokens of a layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from pagewire.services.executor.layers.linear import Linear
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.weights import Dense, PackedWeight


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The choice of experts for a token, and their weights: `ops.route_experts` of a linear layer's outputs."""

    top_k: int
    router: str = "gate"  # the checkpoint's name of that layer
    bias: bool = False  # of that layer
    in_fp32: bool = False  # compute that layer in fp32, regardless of the model's dtype
    scoring: Literal["softmax", "sigmoid", "softmax_of_chosen"] = "softmax"
    normalize: bool = False  # weights of a token's experts sum to 1
    scale: float = 1.0  # of the weights
    num_groups: int = 1  # of neighbouring experts, of which `topk_groups` are eligible
    topk_groups: int = 1
    group_best: int = 1  # a group's score is the sum of this many of its best: 1 (DeepSeek-V2) or 2 (V3)
    correction_bias: str | None = None  # the checkpoint's name of the addend of scores when experts are chosen


class CorrectionBias:
    """A correction that is added to the scores of experts for the choice only, so that all are used about equally;
    fp32."""

    __slots__ = ("name", "tensor")

    def __init__(self, name: str, num_experts: int, placement: Placement) -> None:
        self.name = placement.name(name)
        self.tensor = torch.empty(num_experts, dtype=torch.float32, device=placement.device)

    def load_targets(self) -> Iterator[tuple[str, Tensor]]:
        yield self.name, self.tensor


class Router(Linear):
    """The linear layer that scores the experts for a token."""

    __slots__ = ("dtype",)

    def __init__(self, routing: Routing, num_experts: int, hidden_size: int, placement: Placement) -> None:
        self.dtype = torch.float32 if routing.in_fp32 else placement.dtype
        placement = replace(placement, dtype=self.dtype)
        super().__init__(hidden_size, {routing.router: num_experts}, placement, bias=routing.bias)

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x.to(self.dtype))

    def install(self, parts: Sequence[PackedWeight]) -> None:
        super().install([Dense(part.tensor.to(self.dtype)) if isinstance(part, Dense) else part for part in parts])
