"""The op state_scan on CUDA."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton.common.launch import dependent_launch, launch_dependents, wait_for_inputs
from pagewire.kernels.triton.state_space import tiled_scan
from pagewire.kernels.triton.state_space.softplus import softplus

# Of a program: elements of a head with states in registers.
ELEMENTS = 32
# Tokens of a request up to which it is computed token by token.
FEW = 8


@triton.jit
def _inputs(x, dt, b, c, exists, is_token):
    """Of one token, in fp32; zeros if there is none."""
    return (
        tl.load(x, mask=exists & is_token, other=0.0).to(tl.float32),
        tl.load(dt, mask=is_token, other=0.0).to(tl.float32),
        tl.load(b, mask=is_token, other=0.0).to(tl.float32),
        tl.load(c, mask=is_token, other=0.0).to(tl.float32),
    )


@triton.jit(do_not_specialize=["state_tokens", "dt_min", "dt_max"])
def state_scan_kernel(
    x_ptr,  # [num_tokens, HEADS, HEAD_DIM]
    dt_ptr,  # [num_tokens, HEADS]
    b_ptr,  # [num_tokens, GROUPS, STATE_SIZE]
    c_ptr,
    a_ptr,  # fp32 [HEADS], as are d and dt_bias
    d_ptr,
    dt_bias_ptr,
    out_ptr,  # [num_tokens, HEADS, HEAD_DIM]
    state_ptr,  # fp32 [num_blocks, HEADS, HEAD_DIM, STATE_SIZE], blocks contiguous
    block_table_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    dt_min,
    dt_max,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    block_stride,
    table_stride,
    state_tokens,
    FEW: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Program (request, head, tile of its elements), for requests of at most FEW tokens: token by token, the next one's
    inputs on their way."""
    wait_for_inputs()
    launch_dependents()
    request, head = tl.program_id(0), tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + request)
    first = tl.load(query_start_loc_ptr + request).to(tl.int64)
    query_len = (tl.load(query_start_loc_ptr + request + 1) - first).to(tl.int32)
    if (seq_len == 0) | (query_len == 0) | (query_len > FEW):
        return
    position = seq_len - query_len
    table = block_table_ptr + request.to(tl.int64) * table_stride
    elements = tl.program_id(2) * ELEMENTS + tl.arange(0, ELEMENTS)
    exists = elements < HEAD_DIM
    numbers = tl.arange(0, STATE_SIZE)
    states = state_ptr + (head * HEAD_DIM + elements[:, None]) * STATE_SIZE + numbers[None, :]
    before = tl.load(table + tl.maximum(position - 1, 0) // state_tokens).to(tl.int64)
    h = tl.load(states + before * block_stride, mask=exists[:, None] & (position > 0), other=0.0)

    group = head // (HEADS // GROUPS)
    x = x_ptr + first * x_stride + head * HEAD_DIM + elements
    dt = dt_ptr + first * dt_stride + head
    b = b_ptr + first * b_stride + group * STATE_SIZE + numbers
    c = c_ptr + first * c_stride + group * STATE_SIZE + numbers
    out = out_ptr + (first * HEADS + head) * HEAD_DIM + elements
    a, d, dt_bias = tl.load(a_ptr + head), tl.load(d_ptr + head), tl.load(dt_bias_ptr + head)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    value, step, b_now, c_now = _inputs(x, dt, b, c, exists, True)
    for i in range(query_len):
        x, dt, b, c = x + x_stride, dt + dt_stride, b + b_stride, c + c_stride
        value_next, step_next, b_next, c_next = _inputs(x, dt, b, c, exists, i + 1 < query_len)
        delta = tl.minimum(tl.maximum(softplus(step + dt_bias), dt_min), dt_max)
        h = h * tl.exp(a * delta) + (delta * value)[:, None] * b_now[None, :]
        y = tl.sum(h * c_now[None, :], axis=1) + d * value
        tl.store(out, y.to(dtype), mask=exists)
        out += HEADS * HEAD_DIM
        position += 1
        if (position % state_tokens == 0) | (position == seq_len):
            after = tl.load(table + (position - 1) // state_tokens).to(tl.int64)
            tl.store(states + after * block_stride, h, mask=exists[:, None])
        value, step, b_now, c_now = value_next, step_next, b_next, c_next


def state_scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    a: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    dt_min: float,
    dt_max: float,
    state: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    state_tokens: int,
) -> Tensor:
    """Computes `reference.state_scan`. state_size is a power of two, and blocks of state are contiguous."""
    num_tokens, num_heads, head_dim = x.shape
    _, groups, size = b.shape
    assert b.shape == c.shape and dt.shape == (num_tokens, num_heads) and num_heads % groups == 0, "x, dt, b, c"
    assert x.stride()[1:] == (head_dim, 1) and dt.stride(1) == 1, "what x and dt have of a token must be contiguous"
    assert b.stride()[1:] == c.stride()[1:] == (size, 1), "what b and c have of a token must be contiguous"
    assert size & (size - 1) == 0, "state_size must be a power of two"
    assert a.dtype == d.dtype == dt_bias.dtype == state.dtype == torch.float32, "a, d, dt_bias and state must be fp32"
    assert state.shape[1:] == (num_heads, head_dim, size), "state: [any, num_heads, head_dim, state_size]"
    assert state.stride()[1:] == (head_dim * size, size, 1), "blocks of state must be contiguous"
    assert block_table.stride(1) == 1, "rows of block_table must be contiguous"
    out = x.new_empty(x.shape)
    if num_tokens == 0:
        return out
    arguments = (
        x,
        dt,
        b,
        c,
        a,
        d,
        dt_bias,
        out,
        state,
        block_table,
        query_start_loc,
        seq_lens,
        dt_min,
        dt_max,
        x.stride(0),
        dt.stride(0),
        b.stride(0),
        c.stride(0),
        state.stride(0),
        block_table.stride(0),
        state_tokens,
    )
    sizes = (FEW, num_heads, groups, head_dim, size)
    tile = _constants(*sizes)
    state_scan_kernel[(seq_lens.shape[0], num_heads, triton.cdiv(head_dim, tile["ELEMENTS"]))](
        *arguments, **tile, **dependent_launch(x.device)
    )
    if max_query_len > FEW:
        tile = tiled_scan.constants(*sizes)
        grid = (seq_lens.shape[0], num_heads, triton.cdiv(head_dim, tile["ELEMENTS"]))
        tiled_scan.tiled_state_scan_kernel[grid](*arguments, **tile)
    return out


@lru_cache
def _constants(few: int, num_heads: int, groups: int, head_dim: int, size: int) -> dict[str, Any]:
    return {
        "FEW": few,
        "HEADS": num_heads,
        "GROUPS": groups,
        "HEAD_DIM": head_dim,
        "STATE_SIZE": size,
        "ELEMENTS": min(ELEMENTS, triton.next_power_of_2(head_dim)),
    }


def specialization(
    dtype: str, num_heads: int, groups: int, head_dim: int, size: int, tiled: bool
) -> tuple[Any, dict[str, str], dict[str, Any], int]:
    """Returns what `state_scan` launches (kernel, argument types, constants, num_warps); tiled: for prompts."""
    types = {
        **dict.fromkeys(("x_ptr", "dt_ptr", "b_ptr", "c_ptr"), f"*{dtype}"),
        **dict.fromkeys(("a_ptr", "d_ptr", "dt_bias_ptr"), "*fp32"),
        "out_ptr": f"*{dtype}",
        "state_ptr": "*fp32",
        **dict.fromkeys(("block_table_ptr", "query_start_loc_ptr", "seq_lens_ptr"), "*i32"),
        **dict.fromkeys(("dt_min", "dt_max"), "fp32"),
        **dict.fromkeys(
            ("x_stride", "dt_stride", "b_stride", "c_stride", "block_stride", "table_stride", "state_tokens"), "i32"
        ),
    }
    sizes = (FEW, num_heads, groups, head_dim, size)
    if tiled:
        return tiled_scan.tiled_state_scan_kernel, types, tiled_scan.constants(*sizes), 4
    return state_scan_kernel, types, _constants(*sizes), 4
