"""The op draft_by_suffix in C++: argument checks, then one call."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.kernels.cpu.runtime.library import F, I, L, P, bind, check_dtype

__all__ = ["draft_by_suffix"]

_draft_by_suffix = bind("draft_by_suffix", *[P] * 3, L, *[P] * 2, L, P, *[I] * 2, *[F] * 2)


def draft_by_suffix(
    rows: Tensor,
    num_wanted: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    others: Tensor,
    num_found: Tensor,
    max_depth: int,
    factor: float,
    min_share: float,
) -> None:
    check_dtype("draft_by_suffix", torch.int32, rows, num_wanted, token_ids, others)
    check_dtype("draft_by_suffix", torch.int64, num_tokens, num_found)
    if not rows.shape == num_wanted.shape == num_found.shape:
        raise ValueError("draft_by_suffix: rows, num_wanted and num_found must be parallel")
    _draft_by_suffix(
        rows.data_ptr(),
        num_wanted.data_ptr(),
        token_ids.data_ptr(),
        token_ids.stride(0),
        num_tokens.data_ptr(),
        others.data_ptr(),
        others.shape[0],
        num_found.data_ptr(),
        rows.shape[0],
        max_depth,
        factor,
        min_share,
    )
