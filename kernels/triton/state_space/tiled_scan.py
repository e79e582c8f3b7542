"""The op state_scan for prompts: many tokens at a time, by products of matrices."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import triton
import triton.language as tl
from pagewire.kernels.triton.state_space.softplus import softplus

# Of a program: tokens that are computed together, and elements of a head.
TOKENS = 32
ELEMENTS = 32


@triton.jit(do_not_specialize=["state_tokens", "dt_min", "dt_max"])
def tiled_state_scan_kernel(
    x_ptr,  # all as of `state_scan_kernel`
    dt_ptr,
    b_ptr,
    c_ptr,
    a_ptr,
    d_ptr,
    dt_bias_ptr,
    out_ptr,
    state_ptr,
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
    TOKENS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Program (request, head, tile of its elements), for requests of more than FEW tokens.

    With l[t] the sum of a * dt up to token t of a tile (arXiv 2405.21060, section 6):

        y[t] = sum over s <= t of exp(l[t] - l[s]) (c[t] b[s]) dt[s] x[s]  +  exp(l[t]) c[t] h  +  d x[t]
        h    = exp(l[last]) h  +  sum over s of exp(l[last] - l[s]) dt[s] x[s] b[s]'

    Products are of x's dtype, with sums in fp32; the state stays in fp32. No tile goes over a block's end.
    """
    request, head = tl.program_id(0), tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + request)
    first = tl.load(query_start_loc_ptr + request).to(tl.int64)
    query_len = (tl.load(query_start_loc_ptr + request + 1) - first).to(tl.int32)
    if (seq_len == 0) | (query_len <= FEW):
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
    tokens = tl.arange(0, TOKENS)
    a, d, dt_bias = tl.load(a_ptr + head), tl.load(d_ptr + head), tl.load(dt_bias_ptr + head)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    is_causal = tokens[:, None] >= tokens[None, :]
    while position < seq_len:
        count = tl.minimum(seq_len - position, state_tokens - position % state_tokens)
        count = tl.minimum(count, TOKENS)
        row = first + (position - (seq_len - query_len)) + tokens
        is_token = tokens < count
        here = is_token[:, None] & exists[None, :]
        x = tl.load(x_ptr + row[:, None] * x_stride + head * HEAD_DIM + elements[None, :], mask=here, other=0.0)
        shared = group * STATE_SIZE + numbers[None, :]
        b = tl.load(b_ptr + row[:, None] * b_stride + shared, mask=is_token[:, None], other=0.0)
        c = tl.load(c_ptr + row[:, None] * c_stride + shared, mask=is_token[:, None], other=0.0)
        step = tl.load(dt_ptr + row * dt_stride + head, mask=is_token, other=0.0).to(tl.float32)
        delta = tl.minimum(tl.maximum(softplus(step + dt_bias), dt_min), dt_max)
        delta = tl.where(is_token, delta, 0.0)
        decay = tl.cumsum(a * delta, axis=0)
        last = tl.sum(a * delta, axis=0)

        between = tl.where(is_causal, decay[:, None] - decay[None, :], -float("inf"))
        scores = tl.dot(c, tl.trans(b), input_precision="ieee") * tl.exp(between) * delta[None, :]
        y = tl.dot(c, tl.trans(h).to(dtype), input_precision="ieee") * tl.exp(decay)[:, None]
        y += tl.dot(scores.to(dtype), x, input_precision="ieee") + d * x.to(tl.float32)
        out = out_ptr + (row[:, None] * HEADS + head) * HEAD_DIM + elements[None, :]
        tl.store(out, y.to(dtype), mask=here)
        added = (x.to(tl.float32) * (tl.exp(last - decay) * delta)[:, None]).to(dtype)
        h = h * tl.exp(last) + tl.dot(tl.trans(added), b, input_precision="ieee")

        position += count
        if (position % state_tokens == 0) | (position == seq_len):
            after = tl.load(table + (position - 1) // state_tokens).to(tl.int64)
            tl.store(states + after * block_stride, h, mask=exists[:, None])


@lru_cache
def constants(few: int, num_heads: int, groups: int, head_dim: int, size: int) -> dict[str, Any]:
    """Launches the kernel. few: tokens of a request that `state_scan_kernel` computes."""
    return {
        "FEW": few,
        "HEADS": num_heads,
        "GROUPS": groups,
        "HEAD_DIM": head_dim,
        "STATE_SIZE": size,
        "TOKENS": TOKENS,
        "ELEMENTS": max(16, min(ELEMENTS, triton.next_power_of_2(head_dim))),
    }
