"""The ops causal_conv, state_scan and gated_rms_norm in C++: argument checks, then one call."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.kernels.cpu.runtime.library import F, I, L, P, bind, dtype_code, norm_weight, threads_for
from pagewire.kernels.ops import MAX_CONV_WIDTH, MAX_STATE_SIZE

__all__ = ["causal_conv", "gated_rms_norm", "state_scan"]

_causal_conv = bind("causal_conv", I, P, L, *[P] * 4, L, P, L, P, P, I, L, L, I, I)
_state_scan = bind("state_scan", I, *[P, L] * 4, *[P] * 3, F, F, P, P, L, P, L, P, P, I, L, *[I] * 5)
_gated_rms_norm = bind("gated_rms_norm", I, P, L, P, L, P, P, L, I, I, F, I)

_SIZES = 16  # the size of a state is a multiple of this


def _check_state(op: str, state: Tensor, shape: tuple[int, ...]) -> None:
    contiguous = state.shape[0] == 0 or state[0].is_contiguous()
    if state.dtype is not torch.float32 or tuple(state.shape[1:]) != shape or not contiguous:
        raise ValueError(
            f"{op}: state must be float32 [num_blocks, {', '.join(map(str, shape))}], each block contiguous, not "
            f"{state.dtype} {tuple(state.shape)} with strides {state.stride()}"
        )


def _check_places(op: str, block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> None:
    if not (block_table.dtype is query_start_loc.dtype is seq_lens.dtype is torch.int32):
        raise TypeError(f"{op}: block_table, query_start_loc and seq_lens must be int32")
    if not (block_table.stride(1) == 1 and query_start_loc.is_contiguous() and seq_lens.is_contiguous()):
        raise ValueError(f"{op}: block_table rows, query_start_loc and seq_lens must be contiguous")


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
    num_tokens, channels = x.shape
    width = len(weight)
    if x.stride(1) != 1 or weight.shape[1] != channels or not weight.is_contiguous() or weight.dtype is not x.dtype:
        raise ValueError("causal_conv: weight must be contiguous, [width, channels] of x's dtype; a token contiguous")
    if not 2 <= width <= MAX_CONV_WIDTH:
        raise ValueError(f"causal_conv: the width must be 2 to {MAX_CONV_WIDTH}, not {width}")
    _check_state("causal_conv", state, (width - 1, channels))
    _check_places("causal_conv", block_table, query_start_loc, seq_lens)
    out = torch.empty((num_tokens, channels), dtype=x.dtype)
    _causal_conv(
        dtype_code(x),
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        None if bias is None else norm_weight(bias, channels, x.dtype),
        out.data_ptr(),
        state.data_ptr(),
        state.stride(0),
        block_table.data_ptr(),
        block_table.stride(0),
        query_start_loc.data_ptr(),
        seq_lens.data_ptr(),
        state_tokens,
        seq_lens.shape[0],
        channels,
        width,
        threads_for(width * x.numel()),
    )
    return out


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
    num_tokens, num_heads, head_dim = x.shape
    _, groups, size = b.shape
    if not (x.dtype is dt.dtype is b.dtype is c.dtype):
        raise TypeError("state_scan: x, dt, b and c must have one dtype")
    if x.stride()[1:] != (head_dim, 1) or dt.stride(1) != 1 or not b.stride()[1:] == c.stride()[1:] == (size, 1):
        raise ValueError("state_scan: what x, dt, b and c have of a token must be contiguous")
    if b.shape != c.shape or dt.shape != (num_tokens, num_heads) or num_heads % groups:
        raise ValueError("state_scan: x, dt, b and c do not fit")
    if size > MAX_STATE_SIZE or size % _SIZES:
        raise ValueError(f"state_scan: a state must have a multiple of {_SIZES} numbers, at most {MAX_STATE_SIZE}")
    for constants in (a, d, dt_bias):
        if constants.dtype is not torch.float32 or constants.shape != (num_heads,) or not constants.is_contiguous():
            raise ValueError("state_scan: a, d and dt_bias must be contiguous float32 [num_heads]")
    _check_state("state_scan", state, (num_heads, head_dim, size))
    _check_places("state_scan", block_table, query_start_loc, seq_lens)
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=x.dtype)
    _state_scan(
        dtype_code(x),
        x.data_ptr(),
        x.stride(0),
        dt.data_ptr(),
        dt.stride(0),
        b.data_ptr(),
        b.stride(0),
        c.data_ptr(),
        c.stride(0),
        a.data_ptr(),
        d.data_ptr(),
        dt_bias.data_ptr(),
        dt_min,
        dt_max,
        out.data_ptr(),
        state.data_ptr(),
        state.stride(0),
        block_table.data_ptr(),
        block_table.stride(0),
        query_start_loc.data_ptr(),
        seq_lens.data_ptr(),
        state_tokens,
        seq_lens.shape[0],
        num_heads,
        groups,
        head_dim,
        size,
        threads_for(size * x.numel()),
    )
    return out


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int) -> Tensor:
    num_tokens, size = x.shape
    if gate.shape != x.shape or gate.dtype is not x.dtype or x.stride(1) != 1 or gate.stride(1) != 1:
        raise ValueError("gated_rms_norm: gate must have x's shape and dtype; tokens must be contiguous")
    if size % group_size:
        raise ValueError(f"gated_rms_norm: {size} is not a multiple of group_size {group_size}")
    out = torch.empty((num_tokens, size), dtype=x.dtype)
    _gated_rms_norm(
        dtype_code(x),
        x.data_ptr(),
        x.stride(0),
        gate.data_ptr(),
        gate.stride(0),
        norm_weight(weight, size, x.dtype),
        out.data_ptr(),
        num_tokens,
        size,
        group_size,
        eps,
        threads_for(x.numel()),
    )
    return out
