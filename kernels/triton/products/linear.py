"""The op linear on CUDA: our own kernel for few rows, which mostly cost reading the weight, else cuBLAS."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from pagewire.kernels import tuning
from pagewire.kernels.triton.products.skinny import MAX_ROWS_APART, skinny_product, tile_tokens

_WHOLE_LOADS = 8  # elements of 16 bits in 16 bytes


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """Computes x [num_tokens, in_features] @ weight [out_features, in_features].T + bias, in dtype (None: x's)."""
    if dtype is not None and dtype is not x.dtype:
        return _wide(x, weight, bias, dtype)
    config = skinny_config(x, weight)
    if config is None:
        return F.linear(x, weight, bias)
    return skinny_product(x, weight, bias, config, norm=None, gated=False)


def _wide(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Computes `linear`, its sums not rounded to x's dtype."""
    config = skinny_config(x, weight)
    if config is not None:
        return skinny_product(x, weight, bias, config, norm=None, gated=False, dtype=dtype)
    if x.is_cuda:
        product = torch.mm(x, weight.t(), out_dtype=dtype)
        return product if bias is None else product.add_(bias)
    return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def skinny_config(x: Tensor, weight: Tensor) -> Mapping[str, int] | None:
    """Returns the configuration of our kernel for these; None where cuBLAS multiplies them."""
    if x.dim() != 2 or not 0 < x.shape[0] <= MAX_ROWS_APART or x.stride(1) != 1:
        return None
    (num_tokens, num_inputs), num_outputs = x.shape, weight.shape[0]
    if num_inputs % _WHOLE_LOADS or not weight.is_contiguous() or (x.is_cuda and x.dtype is torch.float32):
        return None
    config = tuning.lookup(
        "skinny_product", tuning.capability_of(x.device), tokens=tile_tokens(num_tokens), outputs=num_outputs,
        inputs=num_inputs,
    )  # fmt: skip
    return config if num_tokens < config["library_rows"] else None
