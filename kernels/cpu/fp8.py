"""Products with fp8 weights, in C++: weights are converted, activations keep their dtype (no input_scale applies)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu.library import I, L, P, bind, dtype_code
from kernels.quantized.weights import FP8_BLOCK

__all__ = ["fp8_linear"]

# Tokens up to which converting the weights anew for every few tokens beats torch's product with converted ones.
_MAX_DIRECT_TOKENS = {torch.bfloat16: 32}
_MAX_DIRECT_TOKENS_OTHERWISE = 12

# Of converted weights: what stays in a core's cache until it is multiplied.
_PANEL_BYTES = 4_000_000

_fp8_linear = bind("fp8_linear", I, P, P, P, L, P, P, *[L] * 3, I)
_fp8_dequantize = bind("fp8_dequantize", I, P, P, L, P, L, L, I)


def fp8_linear(x: Tensor, weight: Tensor, scales: Tensor, input_scale: Tensor | None, bias: Tensor | None) -> Tensor:
    num_tokens, in_features = x.shape
    out_features = weight.shape[0]
    block_shape = (-(-out_features // FP8_BLOCK), -(-in_features // FP8_BLOCK))
    if (
        weight.dtype is not torch.float8_e4m3fn
        or weight.shape[1] != in_features
        or scales.dtype is not torch.float32
        or scales.shape not in ((out_features,), block_shape)
    ):
        raise ValueError(
            f"fp8_linear: weight {weight.dtype} {tuple(weight.shape)} with scales {scales.dtype} "
            f"{tuple(scales.shape)} do not fit inputs {tuple(x.shape)}"
        )
    if bias is not None and bias.dtype is not x.dtype:
        bias = bias.to(x.dtype)
    weight, scales, x = weight.contiguous(), scales.contiguous(), x.contiguous()
    out = torch.empty((num_tokens, out_features), dtype=x.dtype)
    stride = block_shape[1] if scales.dim() == 2 else 0
    if num_tokens > _MAX_DIRECT_TOKENS.get(x.dtype, _MAX_DIRECT_TOKENS_OTHERWISE) or in_features % 64:
        return _in_panels(x, weight, scales, stride, bias, out)
    _fp8_linear(
        dtype_code(x),
        x.data_ptr(),
        weight.data_ptr(),
        scales.data_ptr(),
        stride,
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        num_tokens,
        in_features,
        out_features,
        torch.get_num_threads(),
    )
    return out


def _in_panels(x: Tensor, weight: Tensor, scales: Tensor, stride: int, bias: Tensor | None, out: Tensor) -> Tensor:
    """A panel of outputs after the other: its weights in x's dtype, then torch's product."""
    out_features, in_features = weight.shape
    rows = max(FP8_BLOCK, _PANEL_BYTES // (in_features * x.itemsize) // FP8_BLOCK * FP8_BLOCK)
    for first in range(0, out_features, rows):
        last = min(first + rows, out_features)
        panel = torch.empty((last - first, in_features), dtype=x.dtype)
        _fp8_dequantize(
            dtype_code(x),
            weight[first:last].data_ptr(),
            scales[first // FP8_BLOCK if stride else first :].data_ptr(),
            stride,
            panel.data_ptr(),
            in_features,
            last - first,
            torch.get_num_threads(),
        )
        product = functional.linear(x, panel, None if bias is None else bias[first:last])
        if rows >= out_features:
            return product
        out[:, first:last] = product
    return out
