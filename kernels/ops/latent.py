"""Latent attention (MLA, DeepSeek-V2): one vector per token stands for the keys and values of all heads.

The vector is a latent part, from which each head's key and value are projected, and a rotary part, which is the rotated
end of every head's key. Instead of projecting keys and values of the whole context, each head's query is projected into
latent space (`head_linear`), attends there, and its result is projected back: the products are the same in another
order. `kv_cache` is one layer's [num_blocks, block_size, latent_dim + rotary_dim], each block contiguous, the stride
between blocks free.
"""

from __future__ import annotations

from torch import Tensor

from pagewire.kernels.ops.definition import op

MAX_LATENT_DIM = 640  # latent and rotary part together; both are multiples of 8


@op()
def latent_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    min_query_len: int,
    scale: float,
    latent_dim: int,
    split_size: int,
    plan: Tensor | None,
) -> Tensor:
    """`paged_attention` of heads that share one key, of which the first latent_dim elements are the value.

    query    [num_tokens, num_heads, latent_dim + rotary_dim]
    returns  [num_tokens, num_heads, latent_dim]; tokens of no request are undefined
    """
    return query.new_empty((*query.shape[:-1], latent_dim))


@op(mutates=("query", "kv_cache"))
def rotary_store_latent(
    positions: Tensor,
    q: Tensor,
    query: Tensor,
    latent: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    norm_weight: Tensor,
    eps: float,
    interleaved: bool,
) -> None:
    """Normalise each token's latent part, rotate its rotary part, store both; rotate the ends of its query heads.

    positions      int64 [num_tokens]
    q              [num_tokens, num_heads, any + rotary_dim]: the last elements of each head are rotated
    query          [num_tokens, num_heads, latent_dim + rotary_dim]: they are written to the end of each head
    latent         [num_tokens, latent_dim + rotary_dim]
    cos_sin_cache  fp32 [max_position, rotary_dim] = cat(cos, sin)
    slot_mapping   int64 [num_tokens]; -1 = padding, not stored
    norm_weight    [latent_dim] of the RMS norm
    interleaved    element 2 i is rotated with 2 i + 1 instead of i with i + rotary_dim / 2
    """


@op(mutates=("out",))
def head_linear(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Computes out[:, h] = x[:, h] @ weight[h].T for every head h.

    x [num_tokens, num_heads, K] and out [num_tokens, num_heads, N] may be views of wider tensors, weight
    [num_heads, N, K] may be transposed: either its outputs or its inputs lie side by side.
    """
