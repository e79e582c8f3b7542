"""The op look_up_drafts on CUDA: one program per row, which reads it once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton.common.launch import dependent_launch, launch_dependents, wait_for_inputs

_TILE = 1024  # places of one loop iteration
_DRAFTS = 16
_WARPS = 4


@triton.jit
def look_up_drafts_kernel(
    rows_ptr,  # int32 [R]
    num_wanted_ptr,  # int32 [R]
    token_ids_ptr,  # int32 [max_num_seqs, max_model_len]
    num_tokens_ptr,  # int64 [max_num_seqs]
    num_found_ptr,  # int64 [R]
    token_ids_stride,
    longest,
    shortest,
    TILE: tl.constexpr,
    DRAFTS: tl.constexpr,
):
    """Grid (R,)."""
    wait_for_inputs()
    launch_dependents()
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index).to(tl.int64)
    text = token_ids_ptr + row * token_ids_stride
    known = tl.load(num_tokens_ptr + row).to(tl.int32)
    last = known - 1
    # Of each lane: the most tokens that a place has in common with the last ones, and the latest such place.
    most = tl.zeros([TILE], tl.int32)
    latest = tl.zeros([TILE], tl.int32)
    for first in range(0, last, TILE):
        place = first + tl.arange(0, TILE)
        common = tl.zeros([TILE], tl.int32)
        is_same = place < last
        for back in range(0, longest):
            is_same = is_same & (place >= back)
            wanted = tl.load(text + tl.maximum(last - back, 0))
            is_same = is_same & (tl.load(text + place - back, mask=is_same, other=-1) == wanted)
            common += is_same.to(tl.int32)
        is_better = common >= most
        most = tl.where(is_better, common, most)
        latest = tl.where(is_better, place, latest)
    length = tl.max(most, axis=0)
    is_found = length >= shortest
    start = tl.where(is_found, tl.max(tl.where(most == length, latest, -1), axis=0) + 1, last)
    num_wanted = tl.load(num_wanted_ptr + index)
    draft = tl.arange(0, DRAFTS)
    mask = draft < num_wanted
    tl.store(text + known + draft, tl.load(text + start + draft % (known - start), mask=mask, other=0), mask=mask)
    tl.store(num_found_ptr + index, tl.where(is_found, tl.minimum(num_wanted, 2 * length), 0).to(tl.int64))


def look_up_drafts(
    rows: Tensor,
    num_wanted: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_found: Tensor,
    longest: int,
    shortest: int,
) -> None:
    """Computes `reference.look_up_drafts`."""
    int32, int64 = (rows, num_wanted, token_ids), (num_tokens, num_found)
    assert all(tensor.dtype == torch.int32 for tensor in int32), "rows, num_wanted and token_ids are int32"
    assert all(tensor.dtype == torch.int64 for tensor in int64), "counts are int64"
    assert all(tensor.stride(-1) == 1 for tensor in (*int32, *int64)), "the last dimension is contiguous"
    assert rows.shape == num_wanted.shape == num_found.shape, "rows, num_wanted and num_found are parallel"
    if rows.shape[0] == 0:
        return
    look_up_drafts_kernel[(rows.shape[0],)](
        rows,
        num_wanted,
        token_ids,
        num_tokens,
        num_found,
        token_ids.stride(0),
        longest,
        shortest,
        TILE=_TILE,
        DRAFTS=_DRAFTS,
        num_warps=_WARPS,
        **dependent_launch(rows.device),
    )


def specialization() -> tuple[Any, dict[str, str], dict[str, Any], int]:
    """Returns (kernel, argument types, constants, num_warps), for ahead-of-time compilation."""
    int32 = ("rows_ptr", "num_wanted_ptr", "token_ids_ptr")
    names = look_up_drafts_kernel.arg_names
    types = {name: "*i32" if name in int32 else "*i64" for name in names if name.endswith("_ptr")}
    numbers = dict.fromkeys(("token_ids_stride", "longest", "shortest"), "i32")
    return look_up_drafts_kernel, types | numbers, {"TILE": _TILE, "DRAFTS": _DRAFTS}, _WARPS
