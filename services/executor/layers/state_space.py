"""Mamba-2's mixer (arXiv 2405.21060): instead of attending to earlier tokens, it keeps a state of them.

One projection gives the gate, the inputs of a convolution over the last few tokens (the heads' inputs x, and the
vectors b and c, which groups of heads share), and each head's time step. In `state_scan` a head's state takes in x b'
and yields y = state c. The state and the convolution's last inputs are kept of a request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagewire.kernels import ops
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.kv_spec import StateSpec
from pagewire.services.executor.layers.linear import Linear
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.step.step_context import StepContext


@dataclass(frozen=True, kw_only=True)
class StateSpaceConfig:
    """Sizes of the mixer, in elements."""

    num_heads: int
    head_dim: int
    state_size: int  # of each element of a head
    num_groups: int  # of heads that share b and c
    conv_width: int
    dt_limit: tuple[float, float]  # of the time steps
    norm_eps: float
    bias: bool  # of the projections
    conv_bias: bool

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise ModelLoadError(f"num_heads ({self.num_heads}) is not a multiple of n_groups ({self.num_groups})")
        for name, size, least, most in (
            ("state_size", self.state_size, 16, ops.MAX_STATE_SIZE),
            ("head_dim", self.head_dim, 1, ops.MAX_STATE_HEAD_DIM),
        ):
            if not least <= size <= most or size & (size - 1):
                raise ModelLoadError(f"config key {name}: expected a power of two from {least} to {most}, found {size}")
        if not 2 <= self.conv_width <= ops.MAX_CONV_WIDTH:
            raise ModelLoadError(f"config key conv_kernel: expected 2 to {ops.MAX_CONV_WIDTH}, found {self.conv_width}")

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: x, b and c."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def spec(self) -> StateSpec:
        """Returns the size of the convolution's last inputs and every head's state."""
        return StateSpec((self.conv_width - 1) * self.conv_size + self.inner_size * self.state_size)


class States:
    """The states that one layer keeps; `bind` sets their memory when it is allocated."""

    __slots__ = ("block_tokens", "config", "conv", "group", "heads", "layer_idx")

    conv: Tensor  # fp32 [num_blocks, conv_width - 1, conv_size]
    heads: Tensor  # fp32 [num_blocks, num_heads, head_dim, state_size]
    group: int  # index of the group of layers that share block tables, which locate a request's states
    block_tokens: int  # tokens per block

    def __init__(self, layer_idx: int, config: StateSpaceConfig) -> None:
        self.layer_idx = layer_idx
        self.config = config

    def kv_spec(self) -> StateSpec:
        return self.config.spec

    def bind(self, kv_cache: Tensor, group: int, block_tokens: int) -> None:
        config = self.config
        split = (config.conv_width - 1) * config.conv_size
        self.conv = kv_cache[:, :split].unflatten(1, (config.conv_width - 1, config.conv_size))
        self.heads = kv_cache[:, split:].unflatten(1, (config.num_heads, config.head_dim, config.state_size))
        self.group, self.block_tokens = group, block_tokens

    def load_targets(self) -> Iterator[tuple[str, Tensor]]:
        """Returns none: `StateSpace` has the weights."""
        return iter(())


class StateSpace:
    """The convolution and the recurrence of one layer: all weights except the projections'."""

    __slots__ = ("a", "config", "conv_bias", "conv_weight", "d", "dt_bias", "name", "norm_weight", "states")

    def __init__(self, layer_idx: int, config: StateSpaceConfig, placement: Placement) -> None:
        in_fp32 = replace(placement, dtype=torch.float32)
        self.name = placement.prefix
        self.config = config
        self.states = States(layer_idx, config)
        self.conv_weight = placement.empty(config.conv_width, config.conv_size)
        self.conv_bias = placement.empty(config.conv_size) if config.conv_bias else None
        self.norm_weight = placement.empty(config.inner_size)
        self.a = in_fp32.empty(config.num_heads)  # until loading is finished, the logarithm of its negative
        self.d = in_fp32.empty(config.num_heads)
        self.dt_bias = in_fp32.empty(config.num_heads)

    def __call__(self, projected: Tensor, context: StepContext) -> Tensor:
        """projected [num_tokens, inner_size + conv_size + num_heads] -> [num_tokens, inner_size]"""
        config, states = self.config, self.states
        table, starts, lens = context.block_tables[states.group], context.query_start_loc, context.seq_lens
        gate, convolved, dt = projected.split([config.inner_size, config.conv_size, config.num_heads], dim=1)
        convolved = ops.causal_conv(
            convolved,
            self.conv_weight,
            self.conv_bias,
            states.conv,
            table,
            starts,
            lens,
            context.max_query_len,
            states.block_tokens,
        )
        shared = config.num_groups * config.state_size
        x, b, c = convolved.split([config.inner_size, shared, shared], dim=1)
        y = ops.state_scan(
            x.unflatten(1, (config.num_heads, config.head_dim)),
            dt,
            b.unflatten(1, (config.num_groups, config.state_size)),
            c.unflatten(1, (config.num_groups, config.state_size)),
            self.a,
            self.d,
            self.dt_bias,
            *config.dt_limit,
            states.heads,
            table,
            starts,
            lens,
            context.max_query_len,
            states.block_tokens,
        )
        group_size = config.inner_size // config.num_groups
        return ops.gated_rms_norm(y.flatten(1), gate, self.norm_weight, config.norm_eps, group_size)

    def finish_loading(self) -> None:
        torch.exp(self.a, out=self.a).neg_()

    def load_targets(self) -> Iterator[tuple[str, Tensor]]:
        yield f"{self.name}conv1d.weight", self.conv_weight.t().unsqueeze(1)
        if self.conv_bias is not None:
            yield f"{self.name}conv1d.bias", self.conv_bias
        yield f"{self.name}A_log", self.a
        yield f"{self.name}D", self.d
        yield f"{self.name}dt_bias", self.dt_bias
        yield f"{self.name}norm.weight", self.norm_weight


class Mamba2Mixer:
    """Projection, state space, projection."""

    __slots__ = ("input", "output", "state_space")

    def __init__(self, layer_idx: int, config: StateSpaceConfig, hidden_size: int, placement: Placement) -> None:
        size = config.inner_size + config.conv_size + config.num_heads
        self.input = Linear(hidden_size, {"in_proj": size}, placement, bias=config.bias)
        self.state_space = StateSpace(layer_idx, config, placement)
        self.output = Linear(config.inner_size, {"out_proj": hidden_size}, placement, bias=config.bias)

    def __call__(self, hidden: Tensor, context: StepContext) -> Tensor:
        """hidden [num_tokens, hidden_size], same shape out"""
        return self.output(self.state_space(self.input(hidden), context))

    def leaves(self) -> Iterator[Linear | StateSpace | States]:
        yield from (self.input, self.state_space, self.state_space.states, self.output)
