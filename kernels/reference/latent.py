"""Latent attention and what surrounds it (`pagewire.kernels.ops.latent`)."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.kernels.reference.attention import paged_attention
from pagewire.kernels.reference.elementwise import rms_norm


def latent_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    min_query_len: int,
    scale: float,
    latent_dim: int,
    split_size: int,
    plan: Tensor | None,
) -> Tensor:
    """Attends over one KV head that is key and value at once; the result's elements past latent_dim are dropped."""
    keys_values = kv_cache[:, None, None].expand(-1, 2, -1, -1, -1)
    output = paged_attention(
        query,
        keys_values,
        block_table,
        query_start_loc,
        seq_lens,
        max_query_len,
        min_query_len,
        scale,
        0,
        0.0,
        None,
        None,
        split_size,
        plan,
    )
    return output[..., :latent_dim].contiguous()


def rotary_store_latent(
    positions: Tensor,
    q: Tensor,
    query: Tensor,
    latent: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    norm_weight: Tensor,
    eps: float,
    interleaved: bool,
) -> None:
    latent_dim, rotary_dim, block_size = norm_weight.shape[0], cos_sin_cache.shape[1], kv_cache.shape[1]
    cos_sin = cos_sin_cache[positions]
    query[..., latent_dim:] = rotated(q[..., -rotary_dim:], cos_sin[:, None], interleaved)
    normed = rms_norm(latent[:, :latent_dim], norm_weight, eps)
    stored = torch.cat((normed, rotated(latent[:, latent_dim:], cos_sin, interleaved)), dim=-1)
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    kv_cache[slots // block_size, slots % block_size] = stored[kept]


def rotated(x: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """Computes x [..., rotary_dim] by the angles of cos_sin [..., rotary_dim] = cat(cos, sin), in x's dtype."""
    cos, sin = cos_sin.chunk(2, dim=-1)
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    first, second = a.float() * cos - b.float() * sin, b.float() * cos + a.float() * sin
    together = torch.stack((first, second), dim=-1).flatten(-2) if interleaved else torch.cat((first, second), dim=-1)
    return together.to(x.dtype)


def head_linear(x: Tensor, weight: Tensor, out: Tensor) -> None:
    out.copy_(torch.einsum("thk,hnk->thn", x.float(), weight.float()))
