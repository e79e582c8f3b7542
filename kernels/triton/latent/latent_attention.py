"""The op latent_attention on CUDA: the kernels of `paged_attention`, with groups of heads in the place of KV heads."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.kernels.ops import SHORT_QUERY
from pagewire.kernels.triton.attention import decode_attention, prefill_attention
from pagewire.kernels.triton.attention.split_plan import plan_for
from pagewire.kernels.triton.common.specialization import Specialization

# Heads of a group, at most: 16 rows of latent_dim fp32 are what the registers of four warps hold well.
MOST_HEADS = 16

# Of both kernels, as `tuning` has it for others. Not tuned: it fits the shared memory of all architectures.
CONFIG = {
    "block_m": 16, "block_n": 32, "descriptors": 0, "num_warps": 4, "num_stages": 2,
    "programs_per_sm": 2, "min_split": 256,
}  # fmt: skip
MOST_FP32 = 256  # latent_dim in fp32: beyond it registers spill by kilobytes


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
    """Computes `reference.latent_attention`; the heads of a token of query, and each block of kv_cache, are
    contiguous."""
    num_tokens, num_heads, width = query.shape
    out = query.new_empty((num_tokens, num_heads, latent_dim))
    if num_tokens == 0 or seq_lens.shape[0] == 0:
        return out
    if query.dtype == torch.float32 and latent_dim > MOST_FP32:
        raise ValueError(
            f"a latent vector of {latent_dim} elements in float32 does not fit a GPU's registers; use --dtype bfloat16"
        )
    block_size = kv_cache.shape[1]
    assert kv_cache.shape[2] == width and kv_cache.stride()[1:] == (width, 1), "blocks must be contiguous"
    assert kv_cache.dtype == query.dtype, "kv_cache has the dtype of query"
    assert kv_cache.stride(0) % 16 == 0, "blocks must begin at multiples of 16 elements"
    assert block_size & (block_size - 1) == 0, "block_size must be a power of two"
    assert width % 8 == 0 and latent_dim % 8 == 0, "sizes must be multiples of 8"
    assert query.stride(2) == 1 and query.stride(1) == width, "the heads of a token must be contiguous"
    assert block_table.dtype == query_start_loc.dtype == seq_lens.dtype == torch.int32, "tables must be int32"
    latents = _as_heads(kv_cache, num_heads)
    if min_query_len <= SHORT_QUERY:
        decode_attention.decode_attention(
            query, latents, out, block_table, query_start_loc, seq_lens, max_query_len, scale, 0, 0.0, None, None,
            split_size, CONFIG, latent_dim, plan,
        )  # fmt: skip
    if max_query_len > SHORT_QUERY:
        prefill_attention.prefill_attention(
            query, latents, out, block_table, query_start_loc, seq_lens, scale, 0, 0.0, None, None, CONFIG, latent_dim
        )
    return out


def plan_latent_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    split_size: int,
) -> Tensor | None:
    """Makes the plan that `pagewire.kernels.ops.plan_latent_attention` returns."""
    if query.shape[0] == 0 or seq_lens.shape[0] == 0:
        return None
    return plan_for(
        query, _as_heads(kv_cache, query.shape[1]), block_table, query_start_loc, seq_lens, max_query_len, 0,
        split_size, CONFIG,
    )  # fmt: skip


def _as_heads(kv_cache: Tensor, num_heads: int) -> Tensor:
    """The cache of `paged_attention` that it is a view of."""
    return kv_cache[:, None, None].expand(-1, 2, num_heads // group_size(num_heads), -1, -1)


def group_size(num_heads: int) -> int:
    """Heads of a group."""
    return next(size for size in range(min(num_heads, MOST_HEADS), 0, -1) if num_heads % size == 0)


def specializations(
    num_heads: int, latent_dim: int, rotary_dim: int, block_size: int, dtype: torch.dtype, *, capability: int
) -> tuple[Specialization, Specialization]:
    """Returns what is compiled for such a model on a GPU of `capability`: for short queries, and for long ones."""
    model = (latent_dim + rotary_dim, group_size(num_heads), block_size, dtype, dtype, CONFIG)
    return (
        decode_attention.specialization(*model, capability=capability, latent_dim=latent_dim),
        prefill_attention.specialization(*model, capability=capability, latent_dim=latent_dim),
    )
