"""A mixture of experts (`pagewire.kernels.ops.experts`)."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.kernels.quantized.weights import FP8_BLOCK, Fp8Weight, GroupedWeight
from pagewire.kernels.reference.elementwise import silu_and_mul
from pagewire.kernels.reference.products import as_fp8


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
    """DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) has most of it, the others parts."""
    scores = logits.float()
    if scoring == "softmax":
        scores = scores.softmax(dim=-1)
    elif scoring == "sigmoid":
        scores = scores.sigmoid()
    choice = scores if correction_bias is None else scores + correction_bias
    if num_groups > 1:
        groups = choice.unflatten(1, (num_groups, -1))
        best = groups.sort(dim=2, descending=True).values[:, :, :group_best].sum(dim=2)
        eligible = torch.zeros_like(best, dtype=torch.bool)
        eligible.scatter_(1, best.sort(dim=1, descending=True, stable=True).indices[:, :topk_groups], True)
        choice = groups.masked_fill(~eligible[:, :, None], float("-inf")).flatten(1)
    ids = choice.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if scoring == "softmax_of_chosen":
        weights = weights.softmax(dim=-1)
    if normalize:
        weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
    return ids.int(), weights * scale


def sort_by_expert(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    flat = ids.flatten()
    order = flat.sort(stable=True).indices.int()
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=ids.device)
    counts.index_add_(0, flat + 1, torch.ones_like(flat))
    return order, counts.cumsum(0, dtype=torch.int32)


def experts_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, order: Tensor, starts: Tensor, gated: bool
) -> Tensor:
    """Multiplies in fp32; rounds once to x's dtype, and once more where gated."""
    num_pairs, num_experts = order.shape[0], starts.shape[0] - 1
    weights = weight.float().unflatten(0, (num_experts, -1))
    out = x.new_empty(num_pairs, weights.shape[1])
    bounds = starts.tolist()
    for expert in range(num_experts):
        pairs = order[bounds[expert] : bounds[expert + 1]].long()
        product = x[pairs * x.shape[0] // max(1, num_pairs)].float() @ weights[expert].T
        if bias is not None:
            product += bias.unflatten(0, (num_experts, -1))[expert].float()
        out[pairs] = product.to(x.dtype)
    return silu_and_mul(out) if gated else out


def grouped_experts_linear(
    x: Tensor, weight: GroupedWeight, bias: Tensor | None, order: Tensor, starts: Tensor, gated: bool
) -> Tensor:
    """May round as `reference.grouped_linear` says."""
    return experts_linear(x, weight.dequantize(), bias, order, starts, gated)


def fp8_experts_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    order: Tensor,
    starts: Tensor,
    gated: bool,
    *,
    quantize_input: bool = False,
) -> Tensor:
    """Multiplies by fp8 weights. quantize_input: see `reference.fp8_linear`."""
    if quantize_input:
        x32 = as_fp8(x.float(), None, FP8_BLOCK if scales.dim() == 2 else x.shape[1])
        return experts_linear(x32, Fp8Weight(weight, scales).dequantize(), bias, order, starts, gated).to(x.dtype)
    return experts_linear(x, Fp8Weight(weight, scales).dequantize(), bias, order, starts, gated)


def combine_experts(y: Tensor, weights: Tensor) -> Tensor:
    pairs = y.float().unflatten(0, weights.shape)
    counted = weights[:, :, None]
    return torch.where(counted == 0, 0, pairs * counted).sum(dim=1).to(y.dtype)
