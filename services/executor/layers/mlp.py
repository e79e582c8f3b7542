"""Feed-forward blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from pagewire.kernels import ops
from pagewire.services.executor.config.model_config import DecoderConfig, ModelLoadError
from pagewire.services.executor.layers.linear import Linear, Split, StreamUpdate
from pagewire.services.executor.layers.norm import RMSNorm
from pagewire.services.executor.layers.placement import Placement

Activation = Callable[[Tensor, torch.dtype], Tensor]  # the dtype is the result's

_GATED: Mapping[str, Activation] = {"silu": ops.silu_and_mul, "gelu_pytorch_tanh": ops.gelu_tanh_and_mul}
_PLAIN: Mapping[str, Activation] = {
    "gelu": ops.gelu,
    "gelu_fast": ops.gelu_tanh,
    "gelu_new": ops.gelu_tanh,
    "gelu_pytorch_tanh": ops.gelu_tanh,
}


class MLP:
    """`down(activation(up(x)))`; with a gated activation `up` gives the gates, then the gated values."""

    __slots__ = ("activation", "down", "up")

    def __init__(self, up: Linear, activation: Activation, down: Linear) -> None:
        self.up = up
        self.activation = activation
        self.down = down

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [num_tokens, hidden_size], same shape out"""
        if self.activation is ops.silu_and_mul:
            return self.down(self.up.gated(hidden))
        return self.down(self.activation(self.up(hidden), self.down.input_dtype))

    @property
    def takes_norm(self) -> bool:
        return self.activation is ops.silu_and_mul and self.up.takes_norm

    def after_norm(self, norm: RMSNorm, hidden: Tensor, stream: StreamUpdate) -> Tensor:
        """Computes the block behind `norm.add(hidden, stream.residual)`; the sum becomes `stream.updated`."""
        return self.down(self.up.after_norm(norm, hidden, stream, gated=True))

    def leaves(self) -> Iterator[Linear]:
        yield from (self.up, self.down)


class GatedMLP(MLP):
    """`down(act(gate(x)) * up(x))` by Llama's names; gate and up projections are one weight."""

    __slots__ = ()

    def __init__(self, config: DecoderConfig, placement: Placement) -> None:
        size, bias = config.intermediate_size, config.mlp_bias
        super().__init__(
            Linear(config.hidden_size, {"gate_proj": size, "up_proj": size}, placement, bias=bias, split=Split.OUTPUTS),
            gated_activation(config.hidden_act),
            Linear(size, {"down_proj": config.hidden_size}, placement, bias=bias, split=Split.INPUTS),
        )


def gated_activation(name: str) -> Activation:
    """[num_tokens, 2 * size] -> [num_tokens, size], by the name in config.json."""
    return _named(name, _GATED)


def plain_activation(name: str) -> Activation:
    return _named(name, _PLAIN)


def _named(name: str, activations: Mapping[str, Activation]) -> Activation:
    if not isinstance(name, str) or name not in activations:
        raise ModelLoadError(f"config key hidden_act: {name!r} is not one of {', '.join(activations)}")
    return activations[name]
