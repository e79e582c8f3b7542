"""look_up_drafts in C++: argument checks, then one call."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.kernels.cpu.library import I, L, P, bind

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
    for tensors, dtype in (((rows, num_wanted, token_ids), torch.int32), ((num_tokens, num_found), torch.int64)):
        for x in tensors:
            if x.dtype is not dtype or x.stride()[-1] != 1:
                raise TypeError(f"look_up_drafts: must be {dtype} in contiguous rows, not {x.dtype} {tuple(x.shape)}")
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
