"""The CPU ops in C++: argument checks, then one call. Shapes and meanings are those of `pagewire.kernels.reference`.

Importing this module raises BuildError where the C++ kernels cannot be compiled.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from pagewire.kernels.cpu import sampling
from pagewire.kernels.cpu.grouped import grouped_embedding, grouped_linear
from pagewire.kernels.cpu.library import F, I, L, P, bind, dtype_code, norm_weight, threads_for
from pagewire.kernels.cpu.packed_linear import packed_embedding, packed_linear
from pagewire.kernels.cpu.paged import paged_attention, rotary_store_kv, store_kv
from pagewire.kernels.cpu.quantized import fp8_linear, int8_linear
from pagewire.kernels.cpu.sampling import apply_penalties
from pagewire.kernels.cpu.token_groups import TokenGroups, sample_tokens

__all__ = [
    "accept_tokens",
    "add_rms_norm",
    "apply_penalties",
    "fp8_linear",
    "gelu_tanh_and_mul",
    "grouped_embedding",
    "grouped_linear",
    "int8_linear",
    "linear",
    "packed_embedding",
    "packed_linear",
    "paged_attention",
    "rotary_store_kv",
    "sample_tokens",
    "silu_and_mul",
    "step_inputs",
    "store_kv",
    "token_logprobs",
]

# Tokens up to which reading row-major weights directly beats torch's blocked product, by dtype.
_MAX_DIRECT_TOKENS = {torch.bfloat16: 32, torch.float16: 16, torch.float32: 16}

_add_rms_norm = bind("add_rms_norm", I, *[P] * 4, L, I, F, I)
_gated = bind("gated", I, I, P, P, L, I, I)
_linear = bind("linear", I, *[P] * 4, *[L] * 3, I)
_accept_tokens = bind("accept_tokens", *[P] * 4, L, *[P] * 3, I)
_step_inputs = bind("step_inputs", *[P] * 6, L, P, P, L, *[P] * 5, L, L, I)

token_logprobs = partial(sampling.token_logprobs, TokenGroups)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not residual.is_contiguous() or residual.shape != x.shape or residual.dtype is not x.dtype:
        raise ValueError("add_rms_norm: residual must be contiguous, of x's shape and dtype")
    x = x.contiguous()
    size = x.shape[-1]
    out = torch.empty_like(x)
    _add_rms_norm(
        dtype_code(x),
        x.data_ptr(),
        residual.data_ptr(),
        norm_weight(weight, x.dtype, size),
        out.data_ptr(),
        x.numel() // size,
        size,
        eps,
        threads_for(x.numel()),
    )
    return out


def silu_and_mul(x: Tensor) -> Tensor:
    return _gated_into(x, gelu=0)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    return _gated_into(x, gelu=1)


def _gated_into(x: Tensor, gelu: int) -> Tensor:
    x = x.contiguous()
    size = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype)
    rows = out.numel() // size
    _gated(dtype_code(x), gelu, x.data_ptr(), out.data_ptr(), rows, size, threads_for(out.numel()))
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    num_tokens, in_features = x.shape
    dtype = x.dtype
    if (
        num_tokens > _MAX_DIRECT_TOKENS.get(dtype, 0)
        or in_features % 32
        or weight.shape[1] != in_features
        or weight.dtype is not dtype
        or not weight.is_contiguous()
        or (bias is not None and bias.dtype is not dtype)
    ):
        return functional.linear(x, weight, bias)
    x = x.contiguous()
    out_features = weight.shape[0]
    out = torch.empty((num_tokens, out_features), dtype=dtype)
    _linear(
        dtype_code(x),
        x.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        num_tokens,
        in_features,
        out_features,
        torch.get_num_threads(),
    )
    return out


def step_inputs(
    rows: Tensor,
    query_start_loc: Tensor,
    num_blocks: Tensor,
    new_block_start_loc: Tensor,
    new_block_ids: Tensor,
    token_ids: Tensor,
    num_computed_tokens: Tensor,
    row_block_table: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    block_size: int,
) -> None:
    ids_and_lengths = (rows, query_start_loc, num_blocks, new_block_start_loc, new_block_ids, seq_lens)
    tables = (token_ids, row_block_table, block_table)
    for tensors, dtype in (
        (ids_and_lengths + tables, torch.int32),
        ((num_computed_tokens, input_ids, positions, slot_mapping), torch.int64),
    ):
        for x in tensors:
            if x.dtype is not dtype or x.stride()[-1] != 1:  # quicker than stride(-1)
                raise TypeError(f"step_inputs: must be {dtype} in contiguous rows, not {x.dtype} {tuple(x.shape)}")
    _step_inputs(
        rows.data_ptr(),
        query_start_loc.data_ptr(),
        num_blocks.data_ptr(),
        new_block_start_loc.data_ptr(),
        new_block_ids.data_ptr(),
        token_ids.data_ptr(),
        token_ids.stride(0),
        num_computed_tokens.data_ptr(),
        row_block_table.data_ptr(),
        row_block_table.stride(0),
        input_ids.data_ptr(),
        positions.data_ptr(),
        slot_mapping.data_ptr(),
        seq_lens.data_ptr(),
        block_table.data_ptr(),
        block_table.stride(0),
        block_size,
        rows.shape[0],
    )


def accept_tokens(
    sampled: Tensor,
    rows: Tensor,
    sample_start_loc: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_computed_tokens: Tensor,
    num_gained: Tensor,
) -> None:
    for tensors, dtype in (
        ((rows, sample_start_loc, token_ids), torch.int32),
        ((sampled, num_tokens, num_computed_tokens, num_gained), torch.int64),
    ):
        for x in tensors:
            if x.dtype is not dtype or x.stride()[-1] != 1:
                raise TypeError(f"accept_tokens: must be {dtype} in contiguous rows, not {x.dtype} {tuple(x.shape)}")
    _accept_tokens(
        sampled.data_ptr(),
        rows.data_ptr(),
        sample_start_loc.data_ptr(),
        token_ids.data_ptr(),
        token_ids.stride(0),
        num_tokens.data_ptr(),
        num_computed_tokens.data_ptr(),
        num_gained.data_ptr(),
        rows.shape[0],
    )
