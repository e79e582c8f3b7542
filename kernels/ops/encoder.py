"""Attention without a cache: all of a request's tokens are in the step, and each sees those on both sides."""

from __future__ import annotations

from torch import Tensor

from pagewire.kernels.ops.definition import op


@op()
def encoder_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    scale: float,
    window: int,
) -> Tensor:
    """Attention of every token of a ragged batch to the tokens of its own request, in both directions.

    query            [num_tokens, num_heads, head_dim]
    key, value       [num_tokens, num_kv_heads, head_dim]
    query_start_loc  int32 [num_reqs + 1]: request b's tokens are query_start_loc[b] : query_start_loc[b + 1]
    max_query_len    the longest request of the batch (a launch hint)
    window           how far a token sees on either side; 0 = everything
    returns          [num_tokens, num_heads, head_dim]; tokens of no request are undefined
    """
    return query.new_empty(query.shape)


@op(mutates=("heads",))
def rotate(positions: Tensor, heads: Tensor, cos_sin_cache: Tensor) -> None:
    """Rotary embedding in place; element i of a head pairs with i + rotary_dim / 2.

    positions      int64 [num_tokens]
    heads          [num_tokens, num_heads, head_dim]
    cos_sin_cache  fp32 [max_position, rotary_dim] = cat(cos, sin)
    """
