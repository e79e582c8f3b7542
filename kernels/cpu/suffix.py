"""draft_by_suffix in C++: argument checks, then one call."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.kernels.cpu.library import F, I, L, P, bind

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
    for tensors, dtype in (
        ((rows, num_wanted, token_ids, others), torch.int32),
        ((num_tokens, num_found), torch.int64),
    ):
        for x in tensors:
            if x.dtype is not dtype or x.stride()[-1] != 1:
                raise TypeError(f"draft_by_suffix: must be {dtype} in contiguous rows, not {x.dtype} {tuple(x.shape)}")
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
