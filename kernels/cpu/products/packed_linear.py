"""Products with packed dense weights and rows of them, in C++. The tensors are those of `packed_layout`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from pagewire.kernels.cpu.layouts.packed_layout import fixed_point_shape, is_packed, packed_shape
from pagewire.kernels.cpu.runtime.library import I, L, P, bind, check_rows, dtype_code, result_dtype

__all__ = [
    "in_fixed_point",
    "pack",
    "packed_embedding",
    "packed_gated_linear",
    "packed_linear",
    "packs_fixed_point",
    "rounds_inputs",
    "set_batch_invariant",
    "set_bf16_form",
]

_packed_linear = bind("packed_linear", I, I, I, *[P] * 4, *[L] * 3, I)
_packed_gated_linear = bind("packed_gated_linear", I, I, I, *[P] * 4, *[L] * 3, I)
set_batch_invariant = bind("set_batch_invariant", I)
set_bf16_form = bind("set_bf16_form", I)  # for tests: 0 is the fastest way to multiply, others are in processor.h
_in_fixed_point = bind("in_fixed_point", L, L, P)
_rounds_inputs = bind("rounds_inputs", P)
_packs_fixed_point = bind("packs_fixed_point", P)
_packed_embedding = bind("packed_embedding", P, L, P, I, P, L, I)
_pack_dense = bind("pack_dense", P, P, L, L, I)
_pack_fixed_point = bind("pack_fixed_point", P, P, L, L, I)


def in_fixed_point(num_tokens: int, least: int) -> bool:
    """Returns, for tests, whether products of this many tokens with quantized weights are in fixed point here, which is
    faster from `least` tokens on."""
    return _asked(_in_fixed_point, num_tokens, least)


@cache
def packs_fixed_point() -> bool:
    """Returns whether dense weights are best packed in fixed point: on x86 without a matrix unit."""
    return _asked(_packs_fixed_point)


@cache
def rounds_inputs() -> bool:
    """Returns whether a matrix unit multiplies inputs in bf16, so that they may as well be given in it."""
    return _asked(_rounds_inputs)


def _asked(function: Callable[..., None], *arguments: int) -> bool:
    result = torch.zeros(1, dtype=torch.int32)
    function(*arguments, result.data_ptr())
    return bool(result)


def pack(weight: Tensor, *, fixed_point: bool) -> Tensor:
    """Computes `packed_layout.pack`; in bf16 in the weight's memory unless its shape must be padded."""
    out_features, in_features = weight.shape
    if weight.dtype is not torch.bfloat16 or not weight.is_contiguous():
        raise TypeError(f"what is packed must be contiguous and bfloat16, not {weight.dtype}")
    shape = packed_shape(out_features, in_features)
    if fixed_point:
        result = torch.empty(fixed_point_shape(out_features, in_features), dtype=torch.int16)
    elif weight.numel() == math.prod(shape):
        result = weight.view(shape)
    else:
        result = torch.empty(shape, dtype=torch.bfloat16)
    function = _pack_fixed_point if fixed_point else _pack_dense
    function(weight.data_ptr(), result.data_ptr(), in_features, out_features, torch.get_num_threads())
    return result


def packed_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int, dtype: torch.dtype | None = None
) -> Tensor:
    dtype = result_dtype("packed_linear", x, dtype)
    _check_inputs("packed_linear", x, weight, bias, out_features, dtype)
    out = torch.empty((x.shape[0], out_features), dtype=dtype)
    return _multiply(_packed_linear, x, weight, bias, out_features, out)


def packed_gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    _check_inputs("packed_gated_linear", x, weight, bias, out_features, torch.float32)
    out = torch.empty((x.shape[0], out_features // 2), dtype=x.dtype)
    return _multiply(_packed_gated_linear, x, weight, bias, out_features, out)


def _multiply(
    function: Callable[..., None], x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int, out: Tensor
) -> Tensor:
    num_tokens, in_features = x.shape
    x = x.contiguous()
    function(
        dtype_code(x),
        weight.dtype is torch.int16,
        dtype_code(out),
        x.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        num_tokens,
        in_features,
        out_features,
        torch.get_num_threads(),
    )
    return out


def packed_embedding(token_ids: Tensor, weight: Tensor, num_rows: int, row_size: int) -> Tensor:
    _check("packed_embedding", weight, num_rows, row_size)
    check_rows("packed_embedding", token_ids, num_rows)
    token_ids = token_ids.contiguous().long()
    out = torch.empty((*token_ids.shape, row_size), dtype=torch.bfloat16)
    _packed_embedding(
        token_ids.data_ptr(),
        token_ids.numel(),
        weight.data_ptr(),
        weight.dtype is torch.int16,
        out.data_ptr(),
        row_size,
        torch.get_num_threads(),
    )
    return out


def _check_inputs(
    name: str, x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int, bias_dtype: torch.dtype
) -> None:
    _check(name, weight, out_features, x.shape[1])
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"{name}: x must be bfloat16 or float32, not {x.dtype}")
    if bias is not None and bias.dtype is not bias_dtype:
        raise TypeError(f"{name}: bias must be {bias_dtype}, not {bias.dtype}")


def _check(name: str, weight: Tensor, out_features: int, in_features: int) -> None:
    if not is_packed(weight, out_features, in_features):
        raise ValueError(
            f"{name}: {weight.dtype} {tuple(weight.shape)} is not a packed weight [{out_features}, {in_features}]"
        )
