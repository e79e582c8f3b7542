"""The ops rotary_store_latent and head_linear on CUDA."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton.common.launch import dependent_launch, launch_dependents, wait_for_inputs

# Query heads of a program; the first program of a token also stores its latent vector.
HEADS = 16


@triton.jit
def _rotate(source, target, mask, cos, sin, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """source, target: pointers [rows, 1] to the first of 2 * HALF elements; cos, sin fp32 [1, HALF padded]."""
    dims = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    first = 2 * dims if INTERLEAVED else dims
    second = first + (1 if INTERLEAVED else HALF)
    mask = mask & (dims < HALF)
    a = tl.load(source + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + second, mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = target.dtype.element_ty
    tl.store(target + first, (a * cos - b * sin).to(dtype), mask=mask)
    tl.store(target + second, (b * cos + a * sin).to(dtype), mask=mask)


@triton.jit(do_not_specialize=["eps"])
def rotary_store_latent_kernel(
    positions_ptr,
    q_ptr,  # [num_tokens, NUM_HEADS, Q_DIM]
    query_ptr,  # [num_tokens, NUM_HEADS, LATENT_DIM + 2 * HALF]
    latent_ptr,  # [num_tokens, LATENT_DIM + 2 * HALF]
    cos_sin_ptr,  # fp32 [max_position, 2 * HALF]
    kv_cache_ptr,  # [num_blocks, BLOCK_SIZE, LATENT_DIM + 2 * HALF], blocks contiguous
    slot_mapping_ptr,
    weight_ptr,  # [LATENT_DIM]
    eps,
    q_token_stride,
    q_head_stride,
    query_token_stride,
    query_head_stride,
    latent_stride,
    block_stride,
    NUM_HEADS: tl.constexpr,
    Q_DIM: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Program (token, tile of heads)."""
    wait_for_inputs()
    launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    angles = cos_sin_ptr + tl.load(positions_ptr + token) * (2 * HALF) + dims
    cos = tl.load(angles, mask=dims < HALF, other=0.0)
    sin = tl.load(angles + HALF, mask=dims < HALF, other=0.0)

    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    source = q_ptr + token * q_token_stride + heads * q_head_stride + (Q_DIM - 2 * HALF)
    target = query_ptr + token * query_token_stride + heads * query_head_stride + LATENT_DIM
    _rotate(source, target, heads < NUM_HEADS, cos, sin, HALF, INTERLEAVED)

    slot = tl.load(slot_mapping_ptr + token)
    if tl.program_id(1) > 0 or slot < 0:
        return
    source = latent_ptr + token * latent_stride
    target = kv_cache_ptr + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * (LATENT_DIM + 2 * HALF)
    dtype: tl.constexpr = kv_cache_ptr.dtype.element_ty
    columns = tl.arange(0, triton.next_power_of_2(LATENT_DIM))
    mask = columns < LATENT_DIM
    x = tl.load(source + columns, mask=mask, other=0.0).to(tl.float32)
    normed = (x * tl.rsqrt(tl.sum(x * x) / LATENT_DIM + eps)).to(dtype).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(target + columns, (normed * weight).to(dtype), mask=mask)
    row = tl.zeros([1, 1], tl.int32)
    _rotate(source + LATENT_DIM + row, target + LATENT_DIM + row, row == 0, cos, sin, HALF, INTERLEAVED)


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
    """Computes `reference.rotary_store_latent`. Blocks of kv_cache are contiguous, the others may be strided views."""
    num_tokens, num_heads, width = query.shape
    latent_dim, rotary_dim = norm_weight.shape[0], cos_sin_cache.shape[1]
    assert width == latent_dim + rotary_dim == kv_cache.shape[2], "query and kv_cache do not fit"
    assert latent.shape == (num_tokens, width) and q.shape[:2] == query.shape[:2], "q, query and latent do not fit"
    assert q.stride(2) == query.stride(2) == latent.stride(1) == 1, "their last dimension must be contiguous"
    assert kv_cache.stride()[1:] == (width, 1), "blocks must be contiguous"
    assert slot_mapping.dtype == torch.int64 and slot_mapping.is_contiguous(), "slot_mapping: contiguous int64"
    if num_tokens == 0:
        return
    constants = _constants(num_heads, q.shape[2], latent_dim, rotary_dim, kv_cache.shape[1], interleaved)
    rotary_store_latent_kernel[(num_tokens, triton.cdiv(num_heads, HEADS))](
        positions,
        q,
        query,
        latent,
        cos_sin_cache,
        kv_cache,
        slot_mapping,
        norm_weight,
        eps,
        q.stride(0),
        q.stride(1),
        query.stride(0),
        query.stride(1),
        latent.stride(0),
        kv_cache.stride(0),
        **constants,
        **dependent_launch(q.device),
    )


@lru_cache
def _constants(
    num_heads: int, q_dim: int, latent_dim: int, rotary_dim: int, block_size: int, interleaved: bool
) -> dict[str, Any]:
    return {
        "NUM_HEADS": num_heads,
        "Q_DIM": q_dim,
        "LATENT_DIM": latent_dim,
        "HALF": rotary_dim // 2,
        "BLOCK_SIZE": block_size,
        "INTERLEAVED": interleaved,
        "HEADS": HEADS,
    }


def head_linear(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Computes `reference.head_linear` with cuBLAS."""
    out.copy_(torch.matmul(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1))


def specialization(
    dtype: str, num_heads: int, q_dim: int, latent_dim: int, rotary_dim: int, block_size: int = 16
) -> tuple[Any, dict[str, str], dict[str, Any], int]:
    """Returns what `rotary_store_latent` launches (kernel, argument types, constants, num_warps)."""
    types = {
        "positions_ptr": "*i64",
        "q_ptr": f"*{dtype}",
        "query_ptr": f"*{dtype}",
        "latent_ptr": f"*{dtype}",
        "cos_sin_ptr": "*fp32",
        "kv_cache_ptr": f"*{dtype}",
        "slot_mapping_ptr": "*i64",
        "weight_ptr": f"*{dtype}",
        "eps": "fp32",
        **dict.fromkeys(
            (
                "q_token_stride",
                "q_head_stride",
                "query_token_stride",
                "query_head_stride",
                "latent_stride",
                "block_stride",
            ),
            "i32",
        ),
    }
    constants = _constants(num_heads, q_dim, latent_dim, rotary_dim, block_size, True)
    return rotary_store_latent_kernel, types, constants, 4
