"""Products with grouped weights and rows of them, in C++. The tensors are those of `grouped_layout`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from pagewire.kernels.cpu.layouts.grouped_layout import shape_of
from pagewire.kernels.cpu.runtime.library import I, L, P, bind, check_rows, dtype_code, result_dtype

__all__ = ["grouped_embedding", "grouped_gated_linear", "grouped_linear", "rough_grouped_linear"]

# dtype of scales or offsets -> GroupKind (grouped.h)
KINDS = {None: 0, torch.float16: 1, torch.float32: 2, torch.uint8: 3, torch.int8: 4}

_LINEAR = (I, I, I, P, P, *[I, P] * 2, *[P] * 4, *[L] * 3, I, L, I, I)
_grouped_linear = bind("grouped_linear", *_LINEAR)
_grouped_gated_linear = bind("grouped_gated_linear", *_LINEAR)
_rough_grouped_linear = bind("rough_grouped_linear", I, P, P, *[I, P] * 2, *[P] * 3, *[L] * 3, I, L, I, I)
_grouped_embedding = bind("grouped_embedding", I, P, L, P, *[I, P] * 2, P, P, *[L] * 2, I, L, I, I)


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
    dtype: torch.dtype | None = None,
) -> Tensor:
    check_codes("grouped_linear", codes, out_features, x.shape[1], group_size, bits)
    tables = (*_groups(codes, scales, offsets), None if codebook is None else codebook.data_ptr())
    out = torch.empty((x.shape[0], out_features), dtype=result_dtype("grouped_linear", x, dtype))
    is_exact = dtype is None and x.dtype is torch.float32
    dtypes, form = (dtype_code(x), dtype_code(out), is_exact), (bits, group_size, zero_point)
    return _product(_grouped_linear, dtypes, x, tables, permutation, _as(out, bias), out_features, out, form)


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
    check_codes("grouped_gated_linear", codes, out_features, x.shape[1], group_size, bits)
    if bias is not None and bias.dtype is not torch.float32:
        raise TypeError(f"grouped_gated_linear: bias must be torch.float32, not {bias.dtype}")
    tables = (*_groups(codes, scales, offsets), None if codebook is None else codebook.data_ptr())
    out = torch.empty((x.shape[0], out_features // 2), dtype=x.dtype)
    dtypes, form = (dtype_code(x), dtype_code(out), exact), (bits, group_size, zero_point)
    return _product(_grouped_gated_linear, dtypes, x, tables, permutation, bias, out_features, out, form)


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
    check_codes("rough_grouped_linear", codes, out_features, x.shape[1], group_size, bits)
    tables, form = _groups(codes, scales, offsets), (bits, group_size, zero_point)
    out = torch.empty((x.shape[0], out_features), dtype=x.dtype)
    dtypes, bias = (dtype_code(x),), _as(out, bias)
    return _product(_rough_grouped_linear, dtypes, x, tables, permutation, bias, out_features, out, form)


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
    check_codes("grouped_embedding", codes, num_rows, row_size, group_size, bits)
    check_rows("grouped_embedding", token_ids, num_rows)
    token_ids = token_ids.contiguous().long()
    out = torch.empty((*token_ids.shape, row_size), dtype=dtype)
    _grouped_embedding(
        dtype_code(out),
        token_ids.data_ptr(),
        token_ids.numel(),
        *_groups(codes, scales, offsets),
        None if codebook is None else codebook.data_ptr(),
        out.data_ptr(),
        row_size,
        num_rows,
        bits,
        group_size,
        zero_point,
        torch.get_num_threads(),
    )
    return out


def _groups(codes: Tensor, scales: Tensor, offsets: Tensor | None) -> tuple[int | None, ...]:
    """Returns a weight's arguments of the C++ functions: codes, kind of scales, scales, kind of offsets, offsets"""
    kind = KINDS[None if offsets is None else offsets.dtype]
    offset_data = None if offsets is None else offsets.data_ptr()
    return codes.data_ptr(), KINDS[scales.dtype], scales.data_ptr(), kind, offset_data


def _as(out: Tensor, bias: Tensor | None) -> Tensor | None:
    return bias if bias is None or bias.dtype is out.dtype else bias.to(out.dtype)


def _product(
    function: Callable[..., None],
    dtypes: tuple[int, ...],
    x: Tensor,
    tables: tuple[int | None, ...],
    permutation: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    out: Tensor,
    form: tuple[int, int, int],
) -> Tensor:
    num_tokens, in_features = x.shape
    x = x.contiguous()
    function(
        *dtypes,
        x.data_ptr(),
        *tables,
        None if permutation is None else permutation.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        num_tokens,
        in_features,
        out_features,
        *form,
        torch.get_num_threads(),
    )
    return out


@cache
def _codes_shape(num_outputs: int, num_inputs: int, group_size: int, bits: int) -> tuple[int, int, int, int]:
    return shape_of(num_outputs, num_inputs, group_size).codes_shape(bits)


def check_codes(op: str, codes: Tensor, num_outputs: int, num_inputs: int, group_size: int, bits: int) -> None:
    """Raises ValueError for the tensors of another weight."""
    if codes.shape != _codes_shape(num_outputs, num_inputs, group_size, bits):
        raise ValueError(
            f"{op}: codes of shape {tuple(codes.shape)} are not those of {bits}-bit weights "
            f"[{num_outputs}, {num_inputs}] in groups of {group_size}"
        )
