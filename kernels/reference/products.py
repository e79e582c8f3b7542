"""Products with weights (`pagewire.kernels.ops.products`).

Grouped weights come as numbers, where the ops take them as packed for a device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pagewire.kernels.quantized.weights import FP8_BLOCK, Fp8Weight, GroupedWeight, Int8Weight
from pagewire.kernels.reference.attention import FP8_MAX
from pagewire.kernels.reference.elementwise import add_rms_norm, silu_and_mul


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """Computes x [num_tokens, in_features] @ weight [out_features, in_features].T + bias, in dtype (None: x's)."""
    if dtype is None or dtype is x.dtype:
        return F.linear(x, weight, bias)
    return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


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
    """Computes add_rms_norm, linear and, where gated, silu_and_mul."""
    normed = add_rms_norm(x, updated.copy_(residual), norm_weight, eps)
    product = linear(normed, weight, bias)
    return silu_and_mul(product) if gated else product


def grouped_linear(x: Tensor, weight: GroupedWeight, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """Computes x [num_tokens, K] @ weight [N, K].T + bias [N], in fp32, rounded once to dtype (None: x's).

    Where x has 16 bits, a CPU's kernel may round x to integers with a scale for at most 64 of them (llama.cpp does the
    like), or x and the weight to bf16; a GPU's may round the weight to x's dtype. In fp32 both compute this.
    """
    return _product(x.float(), weight.dequantize(), bias).to(x.dtype if dtype is None else dtype)


def grouped_embedding(token_ids: Tensor, weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """Returns rows [num_tokens, K] of the weight, rounded once to dtype; token_ids int64 [num_tokens]."""
    return weight.dequantize()[token_ids].to(dtype)


def int8_linear(
    x: Tensor, weight: Tensor, scales: Tensor, input_scale: Tensor | None, bias: Tensor | None, gated: bool
) -> Tensor:
    """Multiplies x, quantized to int8, by the weight [N, K].T of an `Int8Weight`; scaled; + bias.

    A token's scale is max|x| / 127 (input_scale where given); values round to nearest even and saturate at +-127
    (-128 with an input_scale).
    """
    x32 = x.float()
    low = -127 if input_scale is None else -128
    x_scale = (x32.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-12) if input_scale is None else input_scale
    codes = (x32 / x_scale).round().clamp(low, 127)
    product = _product(codes * x_scale, Int8Weight(weight, scales).dequantize(), bias).to(x.dtype)
    return silu_and_mul(product) if gated else product


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    input_scale: Tensor | None,
    bias: Tensor | None,
    gated: bool,
    *,
    quantize_input: bool = False,
) -> Tensor:
    """Computes x times an `Fp8Weight` [N, K].T; scaled; + bias.

    quantize_input: as devices do that multiply fp8 (compute capability 8.9 and above): a token's scale, or with blocks
    that of each 128 inputs of a token, is max|x| / 448 (input_scale where given); what lies beyond +-448 saturates.
    """
    x32 = x.float()
    if quantize_input:
        x32 = as_fp8(x32, input_scale, FP8_BLOCK if scales.dim() == 2 else x.shape[-1])
    product = _product(x32, Fp8Weight(weight, scales).dequantize(), bias).to(x.dtype)
    return silu_and_mul(product) if gated else product


def as_fp8(x: Tensor, input_scale: Tensor | None, group_size: int) -> Tensor:
    """Computes x [num_tokens, K] as it is after a conversion to e4m3 and back."""
    if input_scale is not None:
        return (x / input_scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float() * input_scale
    groups = []
    for group in x.split(group_size, dim=-1):
        scale = (group.abs().amax(-1, keepdim=True) / FP8_MAX).clamp(min=1e-12)
        groups.append((group / scale).to(torch.float8_e4m3fn).float() * scale)
    return torch.cat(groups, dim=-1)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = x @ weight.T
    return out if bias is None else out + bias.float()
