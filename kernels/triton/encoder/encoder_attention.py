"""Attention without a cache: a program computes BLOCK_M tokens of one request and head against all that they see."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton.attention.attention_tile import LOG2E, NO_KEY
from pagewire.kernels.triton.common.request_tiles import find_tile, most_tiles, requests_padded
from pagewire.kernels.triton.common.specialization import Specialization

_TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
# In fp32 a tile of keys and one of values take twice the shared memory.
_BLOCK_M, _BLOCK_N, _NUM_WARPS, _NUM_STAGES = 64, 64, 4, 2
_BLOCK_FP32 = 32


@triton.jit(do_not_specialize=["num_reqs"])
def encoder_attention_kernel(
    query_ptr,  # [num_tokens, num_heads, HEAD_DIM], as out; heads are contiguous everywhere
    key_ptr,  # [num_tokens, num_heads / GROUP, HEAD_DIM], as value
    value_ptr,
    out_ptr,
    query_start_loc_ptr,  # int32 [num_reqs + 1]
    num_reqs,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    REQS: tl.constexpr,
):
    """Program (tile of a request's tokens, head). Scores are in units of log2."""
    request, first = find_tile(query_start_loc_ptr, num_reqs, BLOCK_M, REQS)
    if request >= num_reqs:
        return
    head = tl.program_id(1)
    start = tl.load(query_start_loc_ptr + request)
    length = tl.load(query_start_loc_ptr + request + 1) - start
    DIMS: tl.constexpr = max(16, triton.next_power_of_2(HEAD_DIM))
    dims = tl.arange(0, DIMS)
    rows = first + tl.arange(0, BLOCK_M)
    in_tile = (rows < length)[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (start + rows).to(tl.int64)
    query_rows = query_ptr + tokens * query_token_stride + head * query_head_stride
    query = tl.load(query_rows[:, None] + dims[None, :], mask=in_tile, other=0.0)
    keys_ptr = key_ptr + start.to(tl.int64) * key_token_stride + head // GROUP * key_head_stride
    values_ptr = value_ptr + start.to(tl.int64) * value_token_stride + head // GROUP * value_head_stride

    acc = tl.zeros([BLOCK_M, DIMS], tl.float32)
    maximum = tl.full([BLOCK_M], NO_KEY, dtype=tl.float32)
    denominator = tl.zeros([BLOCK_M], dtype=tl.float32)
    begin = 0
    end = length
    if WINDOW > 0:
        begin = tl.maximum(first - WINDOW, 0)
        end = tl.minimum(length, first + BLOCK_M + WINDOW)
    for tile in tl.range(begin, end, BLOCK_N):
        keys = tile + tl.arange(0, BLOCK_N)
        in_keys = (keys < length)[:, None] & (dims < HEAD_DIM)[None, :]
        offsets = keys.to(tl.int64)[:, None]
        key = tl.load(keys_ptr + offsets * key_token_stride + dims[None, :], mask=in_keys, other=0.0)
        value = tl.load(values_ptr + offsets * value_token_stride + dims[None, :], mask=in_keys, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * LOG2E)
        visible = (keys < length)[None, :]
        if WINDOW > 0:
            visible = visible & (tl.abs(keys[None, :] - rows[:, None]) <= WINDOW)
        scores = tl.where(visible, scores, -float("inf"))
        highest = tl.maximum(maximum, tl.max(scores, axis=1))
        weights = tl.exp2(scores - highest[:, None])
        correction = tl.exp2(maximum - highest)
        denominator = denominator * correction + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(value.dtype), value, acc * correction[:, None], input_precision="ieee")
        maximum = highest

    out_rows = out_ptr + (tokens * tl.num_programs(1) + head) * HEAD_DIM
    # A row past the request's end has seen no key of a window: it is not stored, but its zero must not divide.
    result = acc / tl.where(denominator > 0, denominator, 1.0)[:, None]
    tl.store(out_rows[:, None] + dims[None, :], result.to(out_ptr.dtype.element_ty), mask=in_tile)


def encoder_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    scale: float,
    window: int,
) -> Tensor:
    """Computes `reference.encoder_attention`."""
    num_tokens, num_heads, head_dim = query.shape
    assert query.stride(2) == key.stride(2) == value.stride(2) == 1, "heads must be contiguous"
    assert key.shape == value.shape, "key and value must have one shape"
    out = query.new_empty(query.shape)
    if num_tokens == 0:
        return out
    num_reqs = query_start_loc.shape[0] - 1
    group = num_heads // key.shape[1]
    constants, num_warps, num_stages = _constants(head_dim, group, query.dtype, window, requests_padded(num_reqs))
    encoder_attention_kernel[(most_tiles(num_tokens, num_reqs, constants["BLOCK_M"]), num_heads)](
        query,
        key,
        value,
        out,
        query_start_loc,
        num_reqs,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        scale,
        **constants,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out


@cache
def _constants(
    head_dim: int, group: int, dtype: torch.dtype, window: int, reqs: int
) -> tuple[dict[str, Any], int, int]:
    is_fp32 = dtype == torch.float32
    constants = {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_M": _BLOCK_FP32 if is_fp32 else _BLOCK_M,
        "BLOCK_N": _BLOCK_FP32 if is_fp32 else _BLOCK_N,
        "WINDOW": window,
        "REQS": reqs,
    }
    return constants, _NUM_WARPS, 1 if is_fp32 else _NUM_STAGES


def specialization(head_dim: int, group: int, dtype: torch.dtype, window: int = 0) -> Specialization:
    """Returns what `encoder_attention` compiles for such a model."""
    constants, num_warps, num_stages = _constants(head_dim, group, dtype, window, requests_padded(1))
    element = f"*{_TYPES[dtype]}"
    strides = ("query_token", "query_head", "key_token", "key_head", "value_token", "value_head")
    types = dict.fromkeys(("query_ptr", "key_ptr", "value_ptr", "out_ptr"), element)
    types |= {"query_start_loc_ptr": "*i32", "num_reqs": "i32"}
    types |= {f"{name}_stride": "i32" for name in strides} | {"scale": "fp32"}
    return Specialization(encoder_attention_kernel, types, constants, num_warps, num_stages)
