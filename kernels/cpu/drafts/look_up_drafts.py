"""The op look_up_drafts in C++: argument checks, then one call."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.kernels.cpu.runtime.library import I, L, P, bind, check_dtype

__all__ = ["look_up_drafts"]

_look_up_drafts = bind("look_up_drafts", *[P] * 3, L, *[P] * 2, *[I] * 3)


def look_up_drafts(
    rows: Tensor,
    num_wanted: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_found: Tensor,
    longest: int,
    shortest: int,
) -> None:
    check_dtype("look_up_drafts", torch.int32, rows, num_wanted, token_ids)
    check_dtype("look_up_drafts", torch.int64, num_tokens, num_found)
    if not rows.shape == num_wanted.shape == num_found.shape:
        raise ValueError("look_up_drafts: rows, num_wanted and num_found must be parallel")
    _look_up_drafts(
        rows.data_ptr(),
        num_wanted.data_ptr(),
        token_ids.data_ptr(),
        token_ids.stride(0),
        num_tokens.data_ptr(),
        num_found.data_ptr(),
        rows.shape[0],
        longest,
        shortest,
    )
