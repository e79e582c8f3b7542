"""A mixture of experts in C++: argument checks, then one call."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.kernels.cpu.elementwise import silu_and_mul
from pagewire.kernels.cpu.layouts.grouped_layout import TILE
from pagewire.kernels.cpu.layouts.packed_layout import is_packed
from pagewire.kernels.cpu.products.grouped import KINDS, check_codes
from pagewire.kernels.cpu.runtime.library import F, I, L, P, bind, dtype_code, threads_for

__all__ = [
    "combine_experts",
    "experts_linear",
    "grouped_experts_linear",
    "packed_experts_linear",
    "route_experts",
    "sort_by_expert",
]

_SCORING = {"softmax": 0, "sigmoid": 1, "softmax_of_chosen": 2}  # as in experts.cpp

_PAIRS = (P, P, P, L, L, I, L, L)  # result, order, starts; pairs, rows of x, experts, inputs, outputs of an expert
_route_experts = bind("route_experts", I, *[P] * 4, L, *[I] * 4, F, *[I] * 4)
_sort_by_expert = bind("sort_by_expert", P, P, P, L, I)
_experts_linear = bind("experts_linear", I, *[P] * 3, *_PAIRS, I)
_packed_experts_linear = bind("packed_experts_linear", P, P, I, P, *_PAIRS, L, I)
_grouped_experts_linear = bind("grouped_experts_linear", I, P, P, L, *[I, P, L] * 2, P, P, *_PAIRS, I, L, I, I)
_combine_experts = bind("combine_experts", I, P, P, P, L, I, L, I)


def route_experts(
    logits: Tensor,
    correction_bias: Tensor | None,
    top_k: int,
    scoring: str,
    normalize: bool,
    scale: float,
    num_groups: int,
    topk_groups: int,
    group_best: int,
) -> tuple[Tensor, Tensor]:
    num_tokens, num_experts = logits.shape
    if num_experts % num_groups or top_k > num_experts // num_groups * topk_groups:
        raise ValueError(f"route_experts: {top_k} of {num_experts} experts in {topk_groups} of {num_groups} groups")
    if correction_bias is not None and correction_bias.dtype is not torch.float32:
        raise TypeError(f"route_experts: correction_bias must be float32, not {correction_bias.dtype}")
    logits = logits.contiguous()
    ids = torch.empty((num_tokens, top_k), dtype=torch.int32)
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32)
    _route_experts(
        dtype_code(logits),
        logits.data_ptr(),
        None if correction_bias is None else correction_bias.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        num_tokens,
        num_experts,
        top_k,
        _SCORING[scoring],
        normalize,
        scale,
        num_groups,
        topk_groups,
        group_best,
        threads_for(logits.numel()),
    )
    return ids, weights


def sort_by_expert(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    ids = ids.contiguous()
    order = torch.empty(ids.numel(), dtype=torch.int32)
    starts = torch.empty(num_experts + 1, dtype=torch.int32)
    _sort_by_expert(ids.data_ptr(), order.data_ptr(), starts.data_ptr(), ids.numel(), num_experts)
    return order, starts


def experts_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, order: Tensor, starts: Tensor, gated: bool
) -> Tensor:
    if weight.dtype is not x.dtype or weight.shape[1] != x.shape[1] or not weight.is_contiguous():
        raise ValueError(
            f"experts_linear: weight must be contiguous {x.dtype} [.., {x.shape[1]}], not {weight.dtype} "
            f"{tuple(weight.shape)}"
        )
    x = x.contiguous()
    out = _empty(x, order, starts, weight.shape[0])
    _experts_linear(
        dtype_code(x),
        x.data_ptr(),
        weight.data_ptr(),
        _bias(bias, x.dtype),
        *_pairs(out, x, order, starts),
        torch.get_num_threads(),
    )
    return silu_and_mul(out) if gated else out


def packed_experts_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, order: Tensor, starts: Tensor, out_features: int, gated: bool
) -> Tensor:
    if x.dtype is not torch.bfloat16 or not is_packed(weight, out_features, x.shape[1]):
        raise ValueError(
            f"packed_experts_linear: {weight.dtype} {tuple(weight.shape)} is not a packed weight "
            f"[{out_features}, {x.shape[1]}], or x is not bfloat16 but {x.dtype}"
        )
    x = x.contiguous()
    out = _empty(x, order, starts, out_features, tile=TILE)
    _packed_experts_linear(
        x.data_ptr(),
        weight.data_ptr(),
        weight.dtype is torch.int16,
        _bias(bias, x.dtype),
        *_pairs(out, x, order, starts),
        weight.nbytes // (starts.shape[0] - 1),
        torch.get_num_threads(),
    )
    return silu_and_mul(out) if gated else out


def grouped_experts_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    codebook: Tensor | None,
    bias: Tensor | None,
    order: Tensor,
    starts: Tensor,
    out_features: int,
    bits: int,
    group_size: int,
    zero_point: int,
    gated: bool,
) -> Tensor:
    num_experts = starts.shape[0] - 1
    check_codes("grouped_experts_linear", codes, out_features, x.shape[1], group_size, bits)
    x = x.contiguous()
    out = _empty(x, order, starts, out_features, tile=TILE)
    _grouped_experts_linear(
        dtype_code(x),
        x.data_ptr(),
        codes.data_ptr(),
        codes.nbytes // num_experts,
        KINDS[scales.dtype],
        scales.data_ptr(),
        scales.nbytes // num_experts,
        KINDS[None if offsets is None else offsets.dtype],
        None if offsets is None else offsets.data_ptr(),
        0 if offsets is None else offsets.nbytes // num_experts,
        None if codebook is None else codebook.data_ptr(),
        _bias(bias, x.dtype),
        *_pairs(out, x, order, starts),
        bits,
        group_size,
        zero_point,
        torch.get_num_threads(),
    )
    return silu_and_mul(out) if gated else out


def combine_experts(y: Tensor, weights: Tensor) -> Tensor:
    y, weights = y.contiguous(), weights.contiguous()
    num_tokens, top_k = weights.shape
    out = torch.empty((num_tokens, y.shape[1]), dtype=y.dtype)
    _combine_experts(
        dtype_code(y),
        y.data_ptr(),
        weights.data_ptr(),
        out.data_ptr(),
        num_tokens,
        top_k,
        y.shape[1],
        threads_for(y.numel()),
    )
    return out


def _empty(x: Tensor, order: Tensor, starts: Tensor, out_features: int, tile: int = 1) -> Tensor:
    """Returns memory for the results of all pairs. tile: an expert's outputs must be a multiple of this."""
    num_experts = starts.shape[0] - 1
    if out_features % (num_experts * tile):
        raise ValueError(f"{out_features} outputs are not those of {num_experts} experts, a multiple of {tile} each")
    if x.shape[0] and order.shape[0] % x.shape[0]:
        raise ValueError(f"{order.shape[0]} pairs are not of {x.shape[0]} rows")
    return torch.empty((order.shape[0], out_features // num_experts), dtype=x.dtype)


def _pairs(out: Tensor, x: Tensor, order: Tensor, starts: Tensor) -> tuple[int, ...]:
    """Returns the arguments of _PAIRS."""
    sizes = (out.shape[0], x.shape[0], starts.shape[0] - 1, x.shape[1], out.shape[1])
    return (out.data_ptr(), order.data_ptr(), starts.data_ptr(), *sizes)


def _bias(bias: Tensor | None, dtype: torch.dtype) -> int | None:
    if bias is None:
        return None
    if bias.dtype is not dtype or not bias.is_contiguous():
        raise TypeError(f"a bias of experts must be contiguous and {dtype}, not {bias.dtype}")
    return bias.data_ptr()
