"""Batches for the ops of layers with a state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class StateBatch:
    """One step of requests that go on from a context. All strides are those of a model's projections."""

    projected: Tensor  # [num_tokens, conv channels + num_heads]
    conv_weight: Tensor
    conv_bias: Tensor | None
    constants: tuple[Tensor, Tensor, Tensor]  # a, d, dt_bias
    dt_limit: tuple[float, float]
    conv_state: Tensor
    heads_state: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    state_tokens: int
    num_heads: int
    head_dim: int
    groups: int
    size: int

    @classmethod
    def of(
        cls,
        requests: Sequence[tuple[int, int]],
        *,
        state_tokens: int = 8,
        dtype: torch.dtype = torch.float32,
        num_heads: int = 4,
        head_dim: int = 8,
        groups: int = 2,
        size: int = 16,
        width: int = 4,
        bias: bool = True,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        seed: int = 0,
    ) -> StateBatch:
        """Makes a batch. requests: (tokens before the step, tokens of the step); (-1, n) is padding of n tokens. What
        no request has written before is NaN, so that reading it shows."""
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        query_lens = [count for _, count in requests]
        seq_lens = [0 if before < 0 else before + count for before, count in requests]
        places = max(1, -(-max(seq_lens, default=1) // state_tokens))
        num_blocks = len(requests) * places + 2
        order = torch.randperm(num_blocks, generator=generator)[: len(requests) * places]
        table = order.view(len(requests), places).int()
        channels = num_heads * head_dim + 2 * groups * size
        # Of two layers, so that blocks are apart.
        conv_size, heads_size = (width - 1) * channels, num_heads * head_dim * size
        cache = torch.full((num_blocks, 2, conv_size + heads_size), torch.nan)[:, 1]
        for (before, _), row in zip(requests, table.tolist(), strict=True):
            if before > 0:
                cache[row[(before - 1) // state_tokens]] = randn(conv_size + heads_size)
        return cls(
            projected=randn(sum(query_lens), channels + num_heads + 3).to(dtype)[:, 3:],
            conv_weight=randn(width, channels).to(dtype) / 2,
            conv_bias=randn(channels).to(dtype) if bias else None,
            constants=(-torch.rand(num_heads, generator=generator) * 3, randn(num_heads), randn(num_heads)),
            dt_limit=dt_limit,
            conv_state=cache[:, :conv_size].unflatten(1, (width - 1, channels)),
            heads_state=cache[:, conv_size:].unflatten(1, (num_heads, head_dim, size)),
            block_table=table,
            query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int(),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            state_tokens=state_tokens,
            num_heads=num_heads,
            head_dim=head_dim,
            groups=groups,
            size=size,
        )

    @property
    def places(self) -> tuple[Any, ...]:
        longest = int(self.query_start_loc.diff().max())
        return self.block_table, self.query_start_loc, self.seq_lens, longest, self.state_tokens

    def conv_args(self) -> tuple[Any, ...]:
        x = self.projected[:, : -self.num_heads]
        return (x, self.conv_weight, self.conv_bias, self.conv_state, *self.places)

    def scan_args(self) -> tuple[Any, ...]:
        inner, shared = self.num_heads * self.head_dim, self.groups * self.size
        x, b, c, dt = self.projected.split([inner, shared, shared, self.num_heads], dim=1)
        return (
            x.unflatten(1, (self.num_heads, self.head_dim)),
            dt,
            b.unflatten(1, (self.groups, self.size)),
            c.unflatten(1, (self.groups, self.size)),
            *self.constants,
            *self.dt_limit,
            self.heads_state,
            *self.places,
        )

    def tokens(self) -> Tensor:
        """Returns bool [num_tokens]: those of requests, not of padding."""
        return (self.seq_lens > 0).repeat_interleave(self.query_start_loc.diff())
