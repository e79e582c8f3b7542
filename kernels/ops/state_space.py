"""State-space layers (Mamba-2, arXiv 2405.21060): what they keep of a request is a state of constant size.

Both ops that have a state find it through block tables with blocks of `state_tokens` tokens each. A request's
tokens go on from the state after the token before them, in the block that this token is in; zeros, before the first.
Each block that a token of the request is in holds, afterwards, the state after the last such token. `state` is one
layer's part of the blocks: each is contiguous, the stride between blocks is free.

    block_table      int32 [num_reqs, any], of which the places up to the last token's are read
    query_start_loc  int32 [num_reqs + 1]
    seq_lens         int32 [num_reqs], the last token's position + 1; 0 = padding, with undefined tokens
    max_query_len    no request has more tokens; sizes the launch
"""

from __future__ import annotations

from torch import Tensor

from pagewire.kernels.ops.definition import op

MAX_CONV_WIDTH = 8
MAX_STATE_SIZE = 256  # of a channel; and a power of two, of 16 at least
MAX_STATE_HEAD_DIM = 256  # a power of two


@op(mutates=("state",))
def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    state_tokens: int,
) -> Tensor:
    """Computes silu(bias + the sum over j of weight[j] * the token width - 1 - j before), channel by channel.

    x        [num_tokens, channels], any stride between tokens
    weight   [width, channels]
    bias     [channels]
    state    fp32 [num_blocks, width - 1, channels]: the last tokens, the oldest first
    returns  [num_tokens, channels]
    """
    return x.new_empty(x.shape)


@op(mutates=("state",))
def state_scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    a: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    dt_min: float,
    dt_max: float,
    state: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    state_tokens: int,
) -> Tensor:
    """Computes h = exp(a * dt) * h + dt * x b'; y = h c + d * x, token by token and head by head, in fp32.

    dt is softplus(dt + dt_bias), within dt_min and dt_max. Neighbouring heads share b and c of a group.

    x            [num_tokens, num_heads, head_dim]
    dt           [num_tokens, num_heads]
    b, c         [num_tokens, groups, state_size]
    a            fp32 [num_heads], negative; d, dt_bias likewise
    state        fp32 [num_blocks, num_heads, head_dim, state_size]
    returns      [num_tokens, num_heads, head_dim]

    x, dt, b and c may have any stride between tokens; a token's numbers are contiguous.
    """
    return x.new_empty(x.shape)


@op()
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int) -> Tensor:
    """The RMS norm of x * silu(gate), of every group_size elements by themselves; the product is not rounded before.

    x and gate [num_tokens, size], any stride between tokens; weight [size], of x's dtype.
    """
    return x.new_empty(x.shape)
