"""Shapes and dtypes of each op's result, for tracing without data (`torch.library` fake implementations)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def paged_attention(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return query.new_empty(query.shape)


def store_kv(*args: Any, **kwargs: Any) -> None:
    return None


def rotary_store_kv(*args: Any) -> None:
    return None


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


def silu_and_mul(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    return silu_and_mul(x)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def grouped_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    codebook: Tensor | None,
    permutation: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    *form: int,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


def grouped_embedding(token_ids: Tensor, codes: Tensor, *args: Any) -> Tensor:
    row_size, dtype = args[4], args[-1]
    return token_ids.new_empty((*token_ids.shape, row_size), dtype=dtype)


def int8_linear(x: Tensor, weight: Tensor, *args: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def fp8_linear(x: Tensor, weight: Tensor, *args: Any) -> Tensor:
    return int8_linear(x, weight)


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


def packed_embedding(token_ids: Tensor, weight: Tensor, num_rows: int, row_size: int) -> Tensor:
    return weight.new_empty((*token_ids.shape, row_size))


def step_inputs(*args: Any) -> None:
    return None


def sample_tokens(logits: Tensor, *args: Any) -> Tensor:
    return logits.new_empty(logits.shape[:1], dtype=torch.int64)


def apply_penalties(*args: Any) -> None:
    return None


def accept_tokens(*args: Any) -> None:
    return None


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    columns = (logits.shape[0], 1 + num_top)
    return (
        token_ids.new_empty(columns),
        logits.new_empty(columns, dtype=torch.float32),
        token_ids.new_empty(token_ids.shape),
    )
