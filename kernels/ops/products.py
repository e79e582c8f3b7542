"""Products with dense and quantized weights, and rows of them (embeddings).

Everywhere x [num_tokens, K], a weight of N outputs [N, K], bias [N] -> [num_tokens, N] in x's dtype, or in `dtype`
where an op takes it: None is x's, and the only other one is fp32, to which most implementations do not round sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.kernels.ops.definition import op


@op()
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """Computes x @ weight.T + bias."""
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype)


@op(mutates=("updated",))
def normed_linear(
    x: Tensor,
    residual: Tensor,
    updated: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    gated: bool,
) -> Tensor:
    """`linear` of the residual stream normalised, once x is added to it; gated: `silu_and_mul` of that.

    residual     [num_tokens, K] of x's dtype, or fp32; read
    updated      as residual, in other memory: becomes residual + x, as `add_rms_norm` has it, which also says what
                 norm_weight [K] and eps are
    """
    return x.new_empty((*x.shape[:-1], weight.shape[0] // 2 if gated else weight.shape[0]))


@op(cuda=False)
def packed_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int, dtype: torch.dtype | None
) -> Tensor:
    """Computes `linear` of a dense weight in a layout of a CPU (`cpu.packed_layout`); bias of the result's dtype."""
    return x.new_empty((*x.shape[:-1], out_features), dtype=dtype)


@op(cuda=False)
def packed_gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """Computes `silu_and_mul` of `packed_linear`'s result in fp32, rounded once to x's dtype; bias fp32."""
    return x.new_empty((*x.shape[:-1], out_features // 2))


@op(cuda=False)
def packed_embedding(token_ids: Tensor, weight: Tensor, num_rows: int, row_size: int) -> Tensor:
    """Looks up rows [*shape, row_size] of a weight [num_rows, row_size] as `packed_linear` takes it; token_ids int64
    [*shape]."""
    return weight.new_empty((*token_ids.shape, row_size), dtype=torch.bfloat16)


# codes .. permutation and bits .. zero_point are those of a `quantized.PackedGrouped`, which makes these calls.
@op()
def grouped_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    codebook: Tensor | None,
    permutation: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    bits: int,
    group_size: int,
    zero_point: int,
    dtype: torch.dtype | None,
) -> Tensor:
    """Computes x @ weight.T + bias, of a weight quantized in groups."""
    return x.new_empty((*x.shape[:-1], out_features), dtype=dtype)


@op(cuda=False)
def grouped_gated_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    codebook: Tensor | None,
    permutation: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    bits: int,
    group_size: int,
    zero_point: int,
    exact: bool,
) -> Tensor:
    """Computes `silu_and_mul` of `grouped_linear`'s result in fp32, rounded once to x's dtype; bias fp32. exact: x, in
    fp32, is not rounded."""
    return x.new_empty((*x.shape[:-1], out_features // 2))


@op(mutates=("updated",))
def normed_grouped_linear(
    x: Tensor,
    residual: Tensor,
    updated: Tensor,
    norm_weight: Tensor,
    eps: float,
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    codebook: Tensor | None,
    permutation: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    bits: int,
    group_size: int,
    zero_point: int,
    gated: bool,
) -> Tensor:
    """Computes `normed_linear` of a weight as `grouped_linear` takes it."""
    return x.new_empty((*x.shape[:-1], out_features // 2 if gated else out_features))


@op(cuda=False)
def rough_grouped_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    permutation: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    bits: int,
    group_size: int,
    zero_point: int,
) -> Tensor:
    """Computes `grouped_linear` of a weight without a codebook in a CPU's layout; x, of any dtype, may be rounded to 8
    bits per group. For drafts, which another product checks."""
    return x.new_empty((*x.shape[:-1], out_features))


@op()
def grouped_embedding(
    token_ids: Tensor,
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    codebook: Tensor | None,
    num_rows: int,
    row_size: int,
    bits: int,
    group_size: int,
    zero_point: int,
    dtype: torch.dtype,
) -> Tensor:
    """Looks up rows [*shape, row_size], in dtype, of a weight quantized in groups; token_ids int64 [*shape]."""
    return token_ids.new_empty((*token_ids.shape, row_size), dtype=dtype)


@op()
def int8_linear(
    x: Tensor, weight: Tensor, scales: Tensor, input_scale: Tensor | None, bias: Tensor | None, gated: bool
) -> Tensor:
    """Multiplies x, quantized to int8, by the weight and scales of a `quantized.Int8Weight`; + bias. gated: its
    `silu_and_mul`.

    input_scale  fp32 scalar: x's scale; without it each token has its own
    """
    return x.new_empty((*x.shape[:-1], weight.shape[0] // 2 if gated else weight.shape[0]))


@op()
def fp8_linear(
    x: Tensor, weight: Tensor, scales: Tensor, input_scale: Tensor | None, bias: Tensor | None, gated: bool
) -> Tensor:
    """Multiplies x by the weight and scales of a `quantized.Fp8Weight`; + bias; gated: `silu_and_mul` of it.

    input_scale  fp32 scalar: x's scale on devices that multiply fp8 with fp8; without it each token (with scales per
                 block, each 128 inputs of a token) has its own
    """
    return x.new_empty((*x.shape[:-1], weight.shape[0] // 2 if gated else weight.shape[0]))
