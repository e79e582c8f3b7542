"""The op causal_conv on CUDA."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton.common.launch import dependent_launch, launch_dependents, wait_for_inputs
from pagewire.kernels.triton.common.request_tiles import find_tile, most_tiles, requests_padded

# Of a program: tokens of one request (a decode step has one of each) and channels.
MAX_TOKENS = 16
CHANNELS = 128


@triton.jit(do_not_specialize=["num_reqs", "state_tokens"])
def causal_conv_kernel(
    x_ptr,  # [num_tokens, SIZE]
    weight_ptr,  # [WIDTH, SIZE]
    bias_ptr,  # [SIZE], or None
    out_ptr,  # [num_tokens, SIZE]
    state_ptr,  # fp32 [num_blocks, WIDTH - 1, SIZE], blocks contiguous
    block_table_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    num_reqs,
    x_stride,
    block_stride,
    table_stride,
    state_tokens,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    REQS: tl.constexpr,  # 0: a token of each request
):
    """Program (tile of a request's tokens, tile of channels). The first tile's also writes the states, as no other
    program reads what was there before."""
    wait_for_inputs()
    launch_dependents()
    if REQS == 0:
        request = tl.program_id(0)
        start = 0
    else:
        request, start = find_tile(query_start_loc_ptr, num_reqs, TOKENS, REQS)
        if request >= num_reqs:
            return
    seq_len = tl.load(seq_lens_ptr + request)
    first = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - first
    if (seq_len == 0) | (start >= query_len):
        return
    context = seq_len - query_len
    table = block_table_ptr + request.to(tl.int64) * table_stride
    before = state_ptr + tl.load(table + tl.maximum(context - 1, 0) // state_tokens).to(tl.int64) * block_stride
    x = x_ptr + first.to(tl.int64) * x_stride
    channels = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    exists = channels < SIZE

    tokens = (start + tl.arange(0, TOKENS))[:, None]
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + channels, mask=exists, other=0.0).to(tl.float32)
    for j in tl.static_range(WIDTH):
        source = tokens - (WIDTH - 1 - j)
        value = _row(x, before, source, context, source < query_len, channels, exists, x_stride, SIZE, WIDTH)
        total += value * tl.load(weight_ptr + j * SIZE + channels, mask=exists, other=0.0).to(tl.float32)
    out = out_ptr + (first + tokens).to(tl.int64) * SIZE + channels
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out, (total * tl.sigmoid(total)).to(dtype), mask=exists & (tokens < query_len))
    if start > 0:
        return

    # The last block first: only the first of them may be the one that is read.
    rows = tl.arange(0, triton.next_power_of_2(WIDTH - 1))[:, None]
    last_place = (seq_len - 1) // state_tokens
    for i in range(last_place - context // state_tokens + 1):
        place = last_place - i
        end = tl.minimum((place + 1) * state_tokens, seq_len) - context
        tail = end - (WIDTH - 1) + rows
        kept = _row(x, before, tail, context, rows < WIDTH - 1, channels, exists, x_stride, SIZE, WIDTH)
        tl.debug_barrier()
        after = state_ptr + tl.load(table + place).to(tl.int64) * block_stride
        tl.store(after + rows * SIZE + channels, kept, mask=exists & (rows < WIDTH - 1))


@triton.jit
def _row(x, before, source, context, mask, channels, exists, x_stride, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Tokens of the query, in fp32; negative ones are of the state before it, which is zeros without a context."""
    own = tl.load(x + source.to(tl.int64) * x_stride + channels, mask=mask & exists & (source >= 0), other=0.0)
    is_kept = mask & exists & (source < 0) & (context > 0)
    return own.to(tl.float32) + tl.load(before + (WIDTH - 1 + source) * SIZE + channels, mask=is_kept, other=0.0)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    state_tokens: int,
) -> Tensor:
    """Computes `reference.causal_conv`. Blocks of state are contiguous; x may have any stride between tokens."""
    num_tokens, size = x.shape
    width = weight.shape[0]
    assert x.stride(1) == 1 and weight.shape == (width, size) and weight.is_contiguous(), "weight: [width, channels]"
    assert state.dtype == torch.float32 and state.shape[1:] == (width - 1, size), (
        "state: fp32 [any, width - 1, channels]"
    )
    assert state.stride()[1:] == (size, 1), "blocks of state must be contiguous"
    assert block_table.stride(1) == 1, "rows of block_table must be contiguous"
    out = x.new_empty((num_tokens, size))
    if num_tokens == 0:
        return out
    num_reqs = seq_lens.shape[0]
    constants = _constants(size, width, 0 if max_query_len == 1 else requests_padded(num_reqs))
    tiles = num_reqs if max_query_len == 1 else most_tiles(num_tokens, num_reqs, constants["TOKENS"])
    causal_conv_kernel[(tiles, triton.cdiv(size, CHANNELS))](
        x,
        weight,
        bias,
        out,
        state,
        block_table,
        query_start_loc,
        seq_lens,
        num_reqs,
        x.stride(0),
        state.stride(0),
        block_table.stride(0),
        state_tokens,
        **constants,
        **dependent_launch(x.device),
    )
    return out


@lru_cache
def _constants(size: int, width: int, reqs: int) -> dict[str, Any]:
    return {"SIZE": size, "WIDTH": width, "TOKENS": MAX_TOKENS if reqs else 1, "CHANNELS": CHANNELS, "REQS": reqs}


def specialization(dtype: str, size: int, width: int, decodes: bool) -> tuple[Any, dict[str, str], dict[str, Any], int]:
    """Returns what `causal_conv` launches (kernel, argument types, constants, num_warps); decodes: one token each."""
    types = {
        **dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "out_ptr"), f"*{dtype}"),
        "state_ptr": "*fp32",
        **dict.fromkeys(("block_table_ptr", "query_start_loc_ptr", "seq_lens_ptr"), "*i32"),
        **dict.fromkeys(("num_reqs", "x_stride", "block_stride", "table_stride", "state_tokens"), "i32"),
    }
    return causal_conv_kernel, types, _constants(size, width, 0 if decodes else requests_padded(1)), 4
