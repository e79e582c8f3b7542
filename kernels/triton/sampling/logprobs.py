"""The op token_logprobs on CUDA: one pass over all logits (see `token_groups`), then one program per row.

The program looks only into groups that hold a token more probable than the chosen one (its rank), and into one group
for each of the top n: the one with the largest maximum among what is left.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.reference.sampling import GROUP_SIZE
from pagewire.kernels.triton.common.launch import dependent_launch, launch_dependents, wait_for_inputs
from pagewire.kernels.triton.common.ordered import from_ordered, to_ordered
from pagewire.kernels.triton.sampling.token_groups import (
    ROW_WARPS,
    TRITON_TYPES,
    exp_origin,
    group_statistics,
    list_groups,
    load_listed,
    load_scaled,
    num_groups,
    row_constants,
)

_GROUP_SIZE = tl.constexpr(GROUP_SIZE)
_INF = tl.constexpr(float("inf"))
# Below every ordered float: a group of which nothing is left. -inf is a logit like any other.
_NOTHING = tl.constexpr(-(2**31))


@triton.jit(do_not_specialize=["num_top"])
def token_logprobs_kernel(
    logits_ptr,  # [L, vocab_size]
    token_ids_ptr,  # int64 [L]
    top_ids_ptr,  # int64 [L, 1 + num_top]
    logprobs_ptr,  # fp32 [L, 1 + num_top]
    ranks_ptr,  # int64 [L]
    maxima_ptr,  # fp32 [L, num_groups]
    scores_ptr,  # fp32 [L, num_groups]: log-sum-exp
    list_ptr,  # int32 [L, num_groups], workspace
    vocab_size,
    num_groups,
    logits_stride,
    num_top,
    PADDED_GROUPS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (L,)."""
    wait_for_inputs()
    launch_dependents()
    index = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + index * logits_stride
    top_ids = top_ids_ptr + index * (1 + num_top)
    logprobs = logprobs_ptr + index * (1 + num_top)
    groups = tl.arange(0, PADDED_GROUPS)
    in_row = groups < num_groups
    maxima = tl.load(maxima_ptr + index * num_groups + groups, mask=in_row, other=-_INF)
    scores = tl.load(scores_ptr + index * num_groups + groups, mask=in_row, other=-_INF)
    origin = exp_origin(tl.max(maxima, axis=0))
    log_mass = origin + tl.log(tl.sum(tl.exp(scores - origin), axis=0))

    chosen = tl.load(token_ids_ptr + index)
    chosen_logit = tl.load(logits + chosen).to(tl.float32)
    tl.store(top_ids, chosen)
    tl.store(logprobs, chosen_logit - log_mass)
    list_start = list_ptr + index * num_groups
    count = list_groups(list_start, groups, maxima > chosen_logit)
    rank = tl.full([], 1, tl.int64)
    for start in range(0, count, TILE):
        _, values = load_listed(logits, 1.0, vocab_size, list_start, start, count, TILE)
        rank += tl.sum(tl.sum((values > chosen_logit).to(tl.int32), axis=1), axis=0)
    tl.store(ranks_ptr + index, rank)

    # Places go by (logit, lowest id). What is behind the last one given away is left.
    members = tl.arange(0, _GROUP_SIZE)
    best_of_group = tl.where(in_row, to_ordered(maxima), _NOTHING)
    last_value = tl.full([], 2**31 - 1, tl.int32)
    last_id = -1
    for place in range(1, num_top + 1):
        best, group = tl.max(best_of_group, axis=0, return_indices=True)
        ids = group * _GROUP_SIZE + members
        values = tl.where(ids < vocab_size, to_ordered(load_scaled(logits, ids, ids < vocab_size, 1.0)), _NOTHING)
        is_left = (values < last_value) | ((values == last_value) & (ids > last_id))
        last_value = best
        last_id = group * _GROUP_SIZE + tl.argmax(tl.where(is_left, values, _NOTHING), axis=0)
        is_left = (values < last_value) | ((values == last_value) & (ids > last_id))
        next_best = tl.max(tl.where(is_left, values, _NOTHING), axis=0)
        best_of_group = tl.where(groups == group, next_best, best_of_group)
        tl.store(top_ids + place, last_id.to(tl.int64))
        tl.store(logprobs + place, from_ordered(last_value) - log_mass)


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `reference.token_logprobs`; logits has contiguous rows, token_ids is contiguous."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1, "rows of logits must be contiguous"
    assert token_ids.dtype == torch.int64 and token_ids.is_contiguous(), "token_ids must be contiguous int64"
    assert 0 <= num_top <= vocab_size, "num_top must be between 0 and vocab_size"
    device = logits.device
    top_ids = torch.empty((num_rows, 1 + num_top), dtype=torch.int64, device=device)
    logprobs = torch.empty((num_rows, 1 + num_top), dtype=torch.float32, device=device)
    ranks = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return top_ids, logprobs, ranks
    maxima, scores = group_statistics(logits, None, None)
    groups = num_groups(vocab_size)
    token_logprobs_kernel[(num_rows,)](
        logits,
        token_ids,
        top_ids,
        logprobs,
        ranks,
        maxima,
        scores,
        torch.empty((num_rows, groups), dtype=torch.int32, device=device),
        vocab_size,
        groups,
        logits.stride(0),
        num_top,
        **row_constants(vocab_size),
        num_warps=ROW_WARPS,
        **dependent_launch(logits.device),
    )
    return top_ids, logprobs, ranks


def specialization(dtype: torch.dtype, vocab_size: int) -> tuple[Any, dict[str, str], dict[str, Any], int]:
    """Returns (kernel, argument types, constants, num_warps) of the second launch, for ahead-of-time compilation.

    The first launch's is `token_groups.statistics_specialization`.
    """
    types = {
        "logits_ptr": f"*{TRITON_TYPES[dtype]}",
        "token_ids_ptr": "*i64",
        "top_ids_ptr": "*i64",
        "logprobs_ptr": "*fp32",
        "ranks_ptr": "*i64",
        "maxima_ptr": "*fp32",
        "scores_ptr": "*fp32",
        "list_ptr": "*i32",
        "vocab_size": "i32",
        "num_groups": "i32",
        "logits_stride": "i32",
        "num_top": "i32",
    }
    return token_logprobs_kernel, types, row_constants(vocab_size), ROW_WARPS
