"""The gated feed-forward block: gate and up projections in one weight."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from pagewire.kernels import ops
from pagewire.services.executor.layers.linear import Linear
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.model_config import DecoderConfig, ModelLoadError

_GATED_ACTIVATIONS = {"silu": ops.silu_and_mul, "gelu_pytorch_tanh": ops.gelu_tanh_and_mul}


class GatedMLP:
    """`down(act(gate(x)) * up(x))`"""

    __slots__ = ("activation", "down", "gate_up")

    def __init__(self, config: DecoderConfig, placement: Placement) -> None:
        if config.hidden_act not in _GATED_ACTIVATIONS:
            supported = ", ".join(_GATED_ACTIVATIONS)
            raise ModelLoadError(f"config key hidden_act: {config.hidden_act!r} is not one of {supported}")
        size, bias = config.intermediate_size, config.mlp_bias
        self.gate_up = Linear(config.hidden_size, {"gate_proj": size, "up_proj": size}, placement, bias=bias)
        self.down = Linear(size, {"down_proj": config.hidden_size}, placement, bias=bias)
        self.activation = _GATED_ACTIVATIONS[config.hidden_act]

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [num_tokens, hidden_size], same shape out"""
        return self.down(self.activation(self.gate_up(hidden)))

    def leaves(self) -> Iterator[Linear]:
        yield from (self.gate_up, self.down)
