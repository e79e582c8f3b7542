"""The specification: every op in plain torch, written to be read, on any device.

All arithmetic is in fp32 and rounded once to the dtype of the result, except where a comment says otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
) -> Tensor:
    """Causal attention of a ragged batch over a paged KV cache.

    query            [num_tokens, num_heads, head_dim]
    kv_cache         [num_blocks, 2, num_kv_heads, block_size, head_dim], 0 = key, 1 = value
    block_table      int32 [num_reqs, max_blocks]; entries past a request's length are never read
    query_start_loc  int32 [num_reqs + 1]
    seq_lens         int32 [num_reqs], context_len + query_len
    max_query_len    the longest query of the batch (a launch hint)
    returns          [num_tokens, num_heads, head_dim]; tokens of no request are undefined

    Query token i of a request stands at position p = seq_len - query_len + i and attends to positions
    max(0, p - sliding_window + 1) .. p (0 .. p without a window). `soft_cap` c > 0 replaces the scaled scores s by
    c * tanh(s / c).
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = kv_cache.shape[2:4]
    output = torch.zeros_like(query)
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    for b, seq_len in enumerate(lengths):
        start, end = starts[b], starts[b + 1]
        if end == start or seq_len == 0:
            continue
        pages = kv_cache[block_table[b, : -(-seq_len // block_size)].long()].float()
        # [num_pages, 2, num_kv_heads, block_size, head_dim] -> [2, num_heads, seq_len, head_dim]
        keys_values = pages.permute(1, 2, 0, 3, 4).reshape(2, num_kv_heads, -1, head_dim)[:, :, :seq_len]
        key, value = keys_values.repeat_interleave(num_heads // num_kv_heads, dim=1)
        scores = query[start:end].float().transpose(0, 1) @ key.transpose(1, 2) * scale
        if soft_cap > 0:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        scores.masked_fill_(~visible(end - start, seq_len, sliding_window, query.device), float("-inf"))
        output[start:end] = (scores.softmax(-1) @ value).transpose(0, 1).to(query.dtype)
    return output


def visible(query_len: int, seq_len: int, sliding_window: int, device: torch.device) -> Tensor:
    """bool [query_len, seq_len]: the key positions that each query token of one request attends to."""
    query_pos = torch.arange(seq_len - query_len, seq_len, device=device)[:, None]
    key_pos = torch.arange(seq_len, device=device)[None, :]
    mask = key_pos <= query_pos
    if sliding_window > 0:
        mask &= key_pos > query_pos - sliding_window
    return mask


def store_kv(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write key and value [num_tokens, num_kv_heads, head_dim] to their slots; slot -1 = padding, skipped."""
    block_size = kv_cache.shape[3]
    kept = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[kept]
    blocks, offsets = slots // block_size, slots % block_size
    kv_cache[blocks, 0, :, offsets] = key[kept]
    kv_cache[blocks, 1, :, offsets] = value[kept]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x²) + eps) * weight over the last dimension.

    The normalised value is rounded to x's dtype before the weight multiplies it, as in transformers' LlamaRMSNorm.
    """
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x in place; returns rms_norm(residual)."""
    residual.add_(x)
    return rms_norm(residual, weight, eps)


def rotary_embedding(positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor, head_dim: int) -> None:
    """Rotate the first rotary_dim elements of every head in place; element i pairs with i + rotary_dim / 2.

    positions      int64 [num_tokens]
    query, key     [num_tokens, num_heads or num_kv_heads, head_dim]; views into a fused qkv are fine
    cos_sin_cache  fp32 [max_position, rotary_dim] = cat(cos, sin)
    """
    cos, sin = cos_sin_cache[positions][:, None, :].chunk(2, dim=-1)
    half = cos.shape[-1]
    for x in (query, key):
        first, second = x[..., :half].float(), x[..., half : 2 * half].float()  # views of x when it is fp32
        rotated = (first * cos - second * sin, second * cos + first * sin)
        x[..., :half] = rotated[0].to(x.dtype)
        x[..., half : 2 * half] = rotated[1].to(x.dtype)


def silu_and_mul(x: Tensor) -> Tensor:
    """x [num_tokens, 2 * size] -> silu(x[:, :size]) * x[:, size:]."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """x [num_tokens, 2 * size] -> gelu(x[:, :size], tanh approximation) * x[:, size:]."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [num_tokens, in_features] @ weight [out_features, in_features].T + bias."""
    return F.linear(x, weight, bias)
