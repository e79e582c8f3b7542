"""Products with dense row-major weights: in C++, except for many tokens in 16 bits, which torch multiplies."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pagewire.kernels.cpu.runtime.library import I, L, P, bind, dtype_code

__all__ = ["linear"]

# Tokens up to which reading row-major weights directly beats a blocked product, by dtype.
_MAX_DIRECT_TOKENS = {torch.bfloat16: 32, torch.float16: 16, torch.float32: 32}

_linear = bind("linear", I, *[P] * 4, *[L] * 3, I)
_linear_many = bind("linear_many", *[P] * 4, *[L] * 3, I)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """Computes `ops.linear`. Sums are rounded to x's dtype even where the result is fp32: weights that are multiplied
    often are packed (`packed_linear`)."""
    x = x.to(weight.dtype)
    product = _linear_as_x(x, weight, None if bias is None else bias.to(x.dtype))
    return product if dtype is None else product.to(dtype)


def _linear_as_x(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    num_tokens, in_features = x.shape
    dtype = x.dtype
    are_many = num_tokens > _MAX_DIRECT_TOKENS.get(dtype, 0)
    if (
        (are_many and dtype is not torch.float32)
        or weight.shape[1] != in_features
        or weight.dtype is not dtype
        or not weight.is_contiguous()
        or (bias is not None and bias.dtype is not dtype)
    ):
        return functional.linear(x, weight, bias)
    x = x.contiguous()
    out_features = weight.shape[0]
    out = torch.empty((num_tokens, out_features), dtype=dtype)
    pointers = (x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr())
    sizes = (num_tokens, in_features, out_features, torch.get_num_threads())
    if are_many:
        _linear_many(*pointers, *sizes)
    else:
        _linear(dtype_code(x), *pointers, *sizes)
    return out
