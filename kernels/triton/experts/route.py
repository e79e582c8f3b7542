"""The op route_experts on CUDA."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton.common.launch import dependent_launch, launch_dependents, wait_for_inputs
from pagewire.kernels.triton.common.ordered import from_ordered, to_ordered
from pagewire.kernels.triton.common.specialization import Specialization

_SCORING = ("softmax", "sigmoid", "softmax_of_chosen")
_SOFTMAX, _SIGMOID, _SOFTMAX_OF_CHOSEN = (tl.constexpr(i) for i in range(3))

# Keys: int32 that compare like scores. Experts that are not (or no longer) candidates are below all of them.
_NONE = tl.constexpr(-(2**31))
_NAN = tl.constexpr(2**31 - 1)  # largest, as torch sorts


@triton.jit
def _keys(scores, there):
    return tl.where(there, tl.where(scores == scores, to_ordered(scores), _NAN), _NONE)


@triton.jit
def _values(keys):
    return tl.where(keys == _NAN, float("nan"), from_ordered(keys))


@triton.jit
def _eligible(keys, groups, members, TOPK_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, EXPERTS: tl.constexpr):
    """bool [groups, 1]: those with the largest sums of their best scores; keys [groups, members]"""
    sums = tl.zeros_like(tl.max(keys, axis=1).to(tl.float32))
    rest = keys
    for _ in range(GROUP_BEST):
        best = tl.max(rest, axis=1)
        sums += tl.where(best == _NONE, 0.0, _values(best))
        first = tl.min(tl.where(rest == best[:, None], members, EXPERTS), axis=1)
        rest = tl.where(members == first[:, None], _NONE, rest)
    group_keys = _keys(sums[:, None], tl.max(keys, axis=1)[:, None] != _NONE)
    chosen = groups < 0
    for _ in range(TOPK_GROUPS):
        first = tl.min(tl.where(group_keys == tl.max(group_keys), groups, EXPERTS))
        chosen = chosen | (groups == first)
        group_keys = tl.where(groups == first, _NONE, group_keys)
    return chosen


@triton.jit(do_not_specialize=["scale"])
def route_experts_kernel(
    logits_ptr,  # [num_tokens, NUM_GROUPS * GROUP_SIZE]
    correction_bias_ptr,  # fp32 [NUM_GROUPS * GROUP_SIZE], or None
    ids_ptr,  # int32 [num_tokens, TOP_K]
    weights_ptr,  # fp32 [num_tokens, TOP_K]
    scale,
    logits_stride,
    NUM_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,  # experts
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,
    NORMALIZE: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
):
    """One program per token, which takes one expert after the other."""
    wait_for_inputs()
    launch_dependents()
    EXPERTS: tl.constexpr = NUM_GROUPS * GROUP_SIZE
    token = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, triton.next_power_of_2(NUM_GROUPS))[:, None]
    members = tl.arange(0, triton.next_power_of_2(GROUP_SIZE))[None, :]
    there = (groups < NUM_GROUPS) & (members < GROUP_SIZE)
    experts = groups * GROUP_SIZE + members
    row = logits_ptr + token * logits_stride
    scores = tl.load(row + experts, mask=there, other=-float("inf")).to(tl.float32)
    if SCORING == _SOFTMAX:
        exponentials = tl.exp(scores - tl.max(scores))
        scores = exponentials / tl.sum(exponentials)
    elif SCORING == _SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-scores))
    choice = scores
    if correction_bias_ptr is not None:
        choice += tl.load(correction_bias_ptr + experts, mask=there, other=0.0)
    keys = _keys(choice, there)
    if NUM_GROUPS > 1:
        chosen_groups = _eligible(keys, groups, members, TOPK_GROUPS, GROUP_BEST, EXPERTS)
        keys = tl.where(chosen_groups & there, keys, _NONE)

    slots = tl.arange(0, triton.next_power_of_2(TOP_K))
    ids = slots
    weights = slots.to(tl.float32)
    for slot in range(TOP_K):
        expert = tl.min(tl.where(keys == tl.max(keys), experts, EXPERTS))
        is_expert = (experts == expert) & there
        weight = tl.sum(tl.where(is_expert, scores, 0.0))
        ids = tl.where(slots == slot, expert, ids)
        weights = tl.where(slots == slot, weight, weights)
        keys = tl.where(is_expert, _NONE, keys)
    used = slots < TOP_K
    if SCORING == _SOFTMAX_OF_CHOSEN:
        weights = tl.where(used, weights, -float("inf"))
        exponentials = tl.exp(weights - tl.max(weights))
        weights = exponentials / tl.sum(exponentials)
    if NORMALIZE:
        weights = weights / (tl.sum(tl.where(used, weights, 0.0)) + 1e-20)
    tl.store(ids_ptr + token * TOP_K + slots, ids, mask=used)
    tl.store(weights_ptr + token * TOP_K + slots, weights * scale, mask=used)


def route_experts(
    logits: Tensor,
    correction_bias: Tensor | None,
    top_k: int,
    scoring: str,
    normalize: bool,
    scale: float,
    num_groups: int,
    topk_groups: int,
    group_best: int,
) -> tuple[Tensor, Tensor]:
    """Computes `reference.route_experts`; logits may have any stride between rows."""
    num_tokens, num_experts = logits.shape
    assert num_experts % num_groups == 0, "groups must have as many experts each"
    assert top_k <= num_experts // num_groups * topk_groups, "top_k: more than there are in topk_groups"
    assert logits.stride(1) == 1, "the last dimension of logits must be contiguous"
    assert correction_bias is None or correction_bias.dtype is torch.float32, "correction_bias must be float32"
    ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
    if num_tokens > 0:
        constants = _constants(num_experts, top_k, scoring, normalize, num_groups, topk_groups, group_best)
        route_experts_kernel[(num_tokens,)](
            logits,
            correction_bias,
            ids,
            weights,
            scale,
            logits.stride(0),
            **constants,
            num_warps=_WARPS,
            **dependent_launch(logits.device),
        )
    return ids, weights


_WARPS = 1  # reductions within a warp need no shared memory


@lru_cache
def _constants(
    num_experts: int,
    top_k: int,
    scoring: str,
    normalize: bool,
    num_groups: int = 1,
    topk_groups: int = 1,
    group_best: int = 1,
) -> dict[str, Any]:
    return {
        "NUM_GROUPS": num_groups,
        "GROUP_SIZE": num_experts // num_groups,
        "TOP_K": top_k,
        "SCORING": _SCORING.index(scoring),
        "NORMALIZE": normalize,
        "TOPK_GROUPS": topk_groups,
        "GROUP_BEST": group_best,
    }


def specialization(
    dtype: str,
    num_experts: int,
    top_k: int,
    scoring: str,
    normalize: bool,
    groups: tuple[int, int, int] = (1, 1, 1),
    *,
    correction_bias: bool = False,
) -> Specialization:
    """Returns what `route_experts` launches, to compile it ahead of time; dtype is Triton's name of the
    logits' type."""
    types = {
        "logits_ptr": f"*{dtype}",
        "correction_bias_ptr": "*fp32" if correction_bias else "constexpr",
        "ids_ptr": "*i32",
        "weights_ptr": "*fp32",
        "scale": "fp32",
        "logits_stride": "i32",
    }
    absent = {} if correction_bias else {"correction_bias_ptr": None}
    constants = _constants(num_experts, top_k, scoring, normalize, *groups) | absent
    return Specialization(route_experts_kernel, types, constants, num_warps=_WARPS, num_stages=2)
