"""The op accept_tokens on CUDA: one program per request, so that nothing else reads or writes its row while it moves
on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton.common.launch import dependent_launch, launch_dependents, wait_for_inputs

_TILE = 32  # drafts of one loop iteration: there are rarely more
_WARPS = 1


@triton.jit
def accept_tokens_kernel(
    sampled_ptr,  # int64 [S]
    rows_ptr,  # int32 [num_reqs], -1 = padding
    sample_start_loc_ptr,  # int32 [num_reqs + 1]
    token_ids_ptr,  # int32 [max_num_seqs, max_model_len]
    num_tokens_ptr,  # int64 [max_num_seqs]
    num_computed_tokens_ptr,  # int64 [max_num_seqs]
    num_gained_ptr,  # int64 [num_reqs]
    token_ids_stride,
    TILE: tl.constexpr,
):
    """Grid (num_reqs,)."""
    wait_for_inputs()
    launch_dependents()
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + request).to(tl.int64)
    start = tl.load(sample_start_loc_ptr + request)
    num_drafts = tl.load(sample_start_loc_ptr + request + 1) - start - 1
    if (row < 0) | (num_drafts < 0):
        tl.store(num_gained_ptr + request, tl.zeros([], tl.int64))
        return
    num_tokens = tl.load(num_tokens_ptr + row)
    tokens = sampled_ptr + start
    drafts = token_ids_ptr + row * token_ids_stride + num_tokens
    accepted = num_drafts
    for first in range(0, num_drafts, TILE):
        index = first + tl.arange(0, TILE)
        mask = index < num_drafts
        draft = tl.load(drafts + index, mask=mask, other=0).to(tl.int64)
        is_wrong = mask & (draft != tl.load(tokens + index, mask=mask, other=0))
        accepted = tl.minimum(accepted, tl.min(tl.where(is_wrong, index, num_drafts), axis=0))
    # The accepted drafts are where they belong; what was sampled behind them replaces the next one.
    tl.store(drafts + accepted, tl.maximum(tl.load(tokens + accepted).to(tl.int32), 0))
    num_computed_tokens = tl.load(num_computed_tokens_ptr + row)
    tl.store(num_tokens_ptr + row, num_tokens + accepted + 1)
    tl.store(num_computed_tokens_ptr + row, num_computed_tokens - (num_drafts - accepted))
    tl.store(num_gained_ptr + request, accepted.to(tl.int64) + 1)


def accept_tokens(
    sampled: Tensor,
    rows: Tensor,
    sample_start_loc: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_computed_tokens: Tensor,
    num_gained: Tensor,
) -> None:
    """Computes `reference.accept_tokens`. The grid depends on the number of requests alone."""
    num_reqs = rows.shape[0]
    int32, int64 = (rows, sample_start_loc, token_ids), (sampled, num_tokens, num_computed_tokens, num_gained)
    assert all(tensor.dtype == torch.int32 for tensor in int32), "rows, start_loc and token_ids are int32"
    assert all(tensor.dtype == torch.int64 for tensor in int64), "sampled tokens and counts are int64"
    assert all(tensor.stride(-1) == 1 for tensor in (*int32, *int64)), "the last dimension is contiguous"
    assert sample_start_loc.shape[0] == num_reqs + 1, "sample_start_loc is [num_reqs + 1]"
    assert num_gained.shape[0] == num_reqs, "num_gained is [num_reqs]"
    if num_reqs == 0:
        return
    accept_tokens_kernel[(num_reqs,)](
        sampled,
        rows,
        sample_start_loc,
        token_ids,
        num_tokens,
        num_computed_tokens,
        num_gained,
        token_ids.stride(0),
        TILE=_TILE,
        num_warps=_WARPS,
        **dependent_launch(rows.device),
    )


def specialization() -> tuple[Any, dict[str, str], dict[str, Any], int]:
    """Returns (kernel, argument types, constants, num_warps), for ahead-of-time compilation."""
    int32 = ("rows_ptr", "sample_start_loc_ptr", "token_ids_ptr")
    names = accept_tokens_kernel.arg_names
    types = {name: "*i32" if name in int32 else "*i64" for name in names if name.endswith("_ptr")}
    return accept_tokens_kernel, types | {"token_ids_stride": "i32"}, {"TILE": _TILE}, _WARPS
