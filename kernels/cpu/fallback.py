"""CPU ops in plain torch, for machines without a C++ compiler. Attention and sampling differ from the reference."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pagewire.kernels import reference
from pagewire.kernels.cpu import grouped_layout, packed_layout, sampling
from pagewire.kernels.cpu.sampling import apply_penalties
from pagewire.kernels.cpu.state_fallback import state_scan
from pagewire.kernels.reference import (
    accept_tokens,
    add_layer_norm,
    add_rms_norm,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    causal_conv,
    clamped_swiglu,
    combine_experts,
    draft_by_suffix,
    experts_linear,
    gated_rms_norm,
    gelu,
    gelu_tanh,
    gelu_tanh_and_mul,
    int8_linear,
    latent_attention,
    layer_norm,
    linear,
    look_up_drafts,
    mask_tokens,
    norm_add_rms_norm,
    normed_linear,
    rms_norm_,
    rotary_store_kv,
    rotary_store_latent,
    rotate,
    route_experts,
    silu_and_mul,
    sort_by_expert,
    step_inputs,
    store_kv,
)
from pagewire.kernels.reference.sampling import GROUP_SIZE

__all__ = [
    "accept_tokens",
    "add_layer_norm",
    "add_rms_norm",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "apply_penalties",
    "broadcast",
    "causal_conv",
    "clamped_swiglu",
    "combine_experts",
    "draft_by_suffix",
    "encoder_attention",
    "experts_linear",
    "fp8_experts_linear",
    "fp8_linear",
    "gated_rms_norm",
    "gelu",
    "gelu_tanh",
    "gelu_tanh_and_mul",
    "grouped_embedding",
    "grouped_experts_linear",
    "grouped_linear",
    "head_linear",
    "int8_linear",
    "latent_attention",
    "layer_norm",
    "linear",
    "look_up_drafts",
    "mask_tokens",
    "norm_add_rms_norm",
    "normed_grouped_linear",
    "normed_linear",
    "packed_embedding",
    "packed_experts_linear",
    "packed_linear",
    "paged_attention",
    "rms_norm_",
    "rotary_store_kv",
    "rotary_store_latent",
    "rotate",
    "route_experts",
    "sample_tokens",
    "silu_and_mul",
    "sort_by_expert",
    "state_scan",
    "step_inputs",
    "store_kv",
    "token_logprobs",
]


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    min_query_len: int,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    kv_scales: Tensor | None,
    sinks: Tensor | None,
    split_size: int,
    plan: Tensor | None,
) -> Tensor:
    """As `reference.paged_attention`, by torch's fused attention per request where that knows all that is asked for."""
    if soft_cap > 0 or kv_scales is not None or sinks is not None:
        return reference.paged_attention(
            query,
            kv_cache,
            block_table,
            query_start_loc,
            seq_lens,
            max_query_len,
            min_query_len,
            scale,
            sliding_window,
            soft_cap,
            kv_scales,
            sinks,
            split_size,
            plan,
        )
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = kv_cache.shape[2:4]
    output = torch.zeros_like(query)
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    for b, seq_len in enumerate(lengths):
        start, end = starts[b], starts[b + 1]
        query_len = end - start
        if query_len == 0 or seq_len == 0:
            continue
        # Whole pages that no query token of this request can see are not gathered.
        first_page = 0
        if sliding_window > 0:
            first_page = max(0, seq_len - query_len + 1 - sliding_window) // block_size
        pages = kv_cache[block_table[b, first_page : -(-seq_len // block_size)].long()]
        num_keys = seq_len - first_page * block_size
        key, value = pages.permute(1, 2, 0, 3, 4).reshape(2, 1, num_kv_heads, -1, head_dim)[:, :, :, :num_keys]
        if query_len == 1:
            # The heads that share a KV head become query rows of it: one pass over the keys instead of one per head.
            rows = query[start].view(1, num_kv_heads, num_heads // num_kv_heads, head_dim)
            mask = reference.visible(1, num_keys, sliding_window, query.device)
            result = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale)
            output[start] = result.view(num_heads, head_dim)
        else:
            rows = query[start:end].transpose(0, 1)[None]
            mask = reference.visible(query_len, num_keys, sliding_window, query.device)
            result = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
            output[start:end] = result[0].transpose(0, 1)
    return output


def head_linear(x: Tensor, weight: Tensor, out: Tensor) -> None:
    out.copy_(torch.matmul(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1))


def encoder_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    scale: float,
    window: int,
) -> Tensor:
    """As `reference.encoder_attention`, by torch's fused attention per request."""
    output = torch.empty_like(query)
    bounds = query_start_loc.tolist()
    for start, end in pairwise(bounds):
        if start == end:
            continue
        rows, keys, values = (x[start:end].transpose(0, 1)[None] for x in (query, key, value))
        mask = reference.near(end - start, window, query.device) if window > 0 else None
        result = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
        output[start:end] = result[0].transpose(0, 1)
    return output


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """x [num_tokens, K] @ weight.T + bias [N], with `packed_layout`'s weight of N = out_features outputs."""
    return linear(x, packed_layout.unpack(weight, out_features, x.shape[1]), bias)


def packed_embedding(token_ids: Tensor, weight: Tensor, num_rows: int, row_size: int) -> Tensor:
    """token_ids int64 [num_tokens] -> rows [num_tokens, row_size] of a packed weight of num_rows outputs."""
    return packed_layout.unpack(weight, num_rows, row_size)[token_ids]


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
) -> Tensor:
    shape = (out_features, x.shape[1])
    weight = grouped_layout.dequantize(
        codes, scales, offsets, codebook, permutation, shape, bits, group_size, zero_point
    )
    return F.linear(x, weight.to(x.dtype), bias)


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
    normed = add_rms_norm(x, updated.copy_(residual), norm_weight, eps)
    weight = (codes, scales, offsets, codebook, permutation)
    product = grouped_linear(normed, *weight, bias, out_features, bits, group_size, zero_point)
    return silu_and_mul(product) if gated else product


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
    form = (out_features, bits, group_size, zero_point)
    return grouped_linear(x, codes, scales, offsets, None, permutation, bias, *form)


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
    shape = (num_rows, row_size)
    weight = grouped_layout.dequantize(codes, scales, offsets, codebook, None, shape, bits, group_size, zero_point)
    return weight[token_ids].to(dtype)


def packed_experts_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, order: Tensor, starts: Tensor, out_features: int, gated: bool
) -> Tensor:
    return experts_linear(x, packed_layout.unpack(weight, out_features, x.shape[1]), bias, order, starts, gated)


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
    shape = (out_features, x.shape[1])
    weight = grouped_layout.dequantize(codes, scales, offsets, codebook, None, shape, bits, group_size, zero_point)
    return experts_linear(x, weight, bias, order, starts, gated)


def fp8_linear(
    x: Tensor, weight: Tensor, scales: Tensor, input_scale: Tensor | None, bias: Tensor | None, gated: bool
) -> Tensor:
    """For the op's sake: weights that are packed for a CPU have a codebook (`quantized.pack`)."""
    return reference.fp8_linear(x, weight, scales, input_scale, bias, gated)


def fp8_experts_linear(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, order: Tensor, starts: Tensor, gated: bool
) -> Tensor:
    """For the op's sake, as `fp8_linear`."""
    return reference.fp8_experts_linear(x, weight, scales, bias, order, starts, gated)


class TokenGroups:
    """See `pagewire.kernels.cpu.sampling.TokenGroups`."""

    def __init__(self, logits: Tensor, lines: np.ndarray, scales: np.ndarray) -> None:
        if len(lines) < len(logits):
            logits = logits[torch.from_numpy(lines)]
        scaled = logits * torch.from_numpy(scales)[:, None]  # fp32, whatever the logits are
        padded = F.pad(scaled, (0, -logits.shape[1] % GROUP_SIZE), value=float("-inf"))
        groups = padded.unflatten(1, (-1, GROUP_SIZE))
        self._groups, self.maxima = groups.numpy(), groups.amax(-1).numpy()

    def masses(self, line: np.ndarray, lowest: np.ndarray, origin: np.ndarray) -> np.ndarray:
        maxima = self.maxima[line]
        index, group = (maxima >= lowest[:, None]).nonzero()
        values = torch.from_numpy(self.members(line[index], group))
        exponents = values - torch.from_numpy(origin[index, None])
        exponents.masked_fill_(values < torch.from_numpy(lowest[index, None]), -np.inf)
        masses = np.zeros_like(maxima)
        # exp() takes several times as long of -inf and of what underflows; e^-80 is too little to be drawn or to count.
        masses[index, group] = exponents.clamp_(min=-80).exp_().sum(-1).numpy()
        return masses

    def num_above(self, bound: np.ndarray) -> np.ndarray:
        line, group = (self.maxima > bound[:, None]).nonzero()
        counts = (self.members(line, group) > bound[line, None]).sum(-1)
        return np.bincount(line, counts, minlength=len(bound)).astype(np.int64)

    def members(self, line: np.ndarray, group: np.ndarray) -> np.ndarray:
        return self._groups[line, group]


sample_tokens = partial(sampling.sample_tokens, TokenGroups)
token_logprobs = partial(sampling.token_logprobs, TokenGroups)
