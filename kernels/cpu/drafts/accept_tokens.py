"""The op accept_tokens in C++: argument checks, then one call."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.kernels.cpu.runtime.library import I, L, P, bind, check_dtype

__all__ = ["accept_tokens"]

_accept_tokens = bind("accept_tokens", *[P] * 4, L, *[P] * 3, I)


def accept_tokens(
    sampled: Tensor,
    rows: Tensor,
    sample_start_loc: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_computed_tokens: Tensor,
    num_gained: Tensor,
) -> None:
    check_dtype("accept_tokens", torch.int32, rows, sample_start_loc, token_ids)
    check_dtype("accept_tokens", torch.int64, sampled, num_tokens, num_computed_tokens, num_gained)
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
