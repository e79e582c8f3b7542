"""Attention in both directions over the tokens of the step, without a cache."""

from __future__ import annotations

from torch import Tensor

from pagewire.kernels import ops
from pagewire.services.executor.step.step_context import StepContext


class EncoderAttention:
    """Attention with equal numbers of query, key and value heads. `window`: the number of tokens that a token sees on
    either side, 0 = all."""

    __slots__ = ("head_dim", "num_heads", "window")

    def __init__(self, num_heads: int, head_dim: int, window: int = 0) -> None:
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.window = window

    def heads(self, qkv: Tensor) -> Tensor:
        """qkv [num_tokens, 3 * num_heads * head_dim] -> its heads [num_tokens, 3 * num_heads, head_dim]"""
        return qkv.view(len(qkv), 3 * self.num_heads, self.head_dim)

    def __call__(self, heads: Tensor, context: StepContext) -> Tensor:
        """heads: query, then key, then value heads -> [num_tokens, num_heads * head_dim]"""
        query, key, value = heads.split(self.num_heads, dim=1)
        starts, scale = context.query_start_loc, self.head_dim**-0.5
        return ops.encoder_attention(query, key, value, starts, context.max_query_len, scale, self.window).flatten(1)
