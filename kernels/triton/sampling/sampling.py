"""The op sample_tokens on CUDA: two launches with grids fixed by shape, for any mix of parameters of the rows.

The first reads all logits once (see `token_groups`), the second, one program per row, decides: from the groups'
maxima and log-sum-exps, and from the logits of those groups that its parameters make it look into. Nothing is read on
the host; loops end when the device finds that they may.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.reference.sampling import GROUP_SIZE, NOT_A_NUMBER
from pagewire.kernels.sampling_parameters import FloatParameter
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
_NOT_A_NUMBER = tl.constexpr(NOT_A_NUMBER)
_TEMPERATURE = tl.constexpr(int(FloatParameter.TEMPERATURE))
_TOP_P = tl.constexpr(int(FloatParameter.TOP_P))
_MIN_P = tl.constexpr(int(FloatParameter.MIN_P))
# SplitMix64, as in the reference
_GOLDEN_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def _gumbel_noise(key, columns):
    """As `reference_sampling.gumbel_noise`; columns uint64, from 1 on."""
    uniform = ((_mix(key + columns * _GOLDEN_GAMMA) >> 12).to(tl.float64) + 0.5) * 2.0**-52
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def _kth_largest(logits, scale, vocab_size, num_groups, maxima, groups, row_max, k, list_ptr, TILE: tl.constexpr):
    """The k-th largest of a row's scaled logits, by bisection over ordered bits.

    At least k logits are as large as the k-th largest group maximum, so only groups that reach it are looked into:
    k of them, or more where maxima are equal. Both searches end early where just k are found.
    """
    low = to_ordered(tl.full([], -_INF, tl.float32)).to(tl.int64)  # at least k are as large
    high = to_ordered(row_max).to(tl.int64) + 1  # fewer are
    if k <= num_groups:
        low = to_ordered(tl.min(tl.where(groups < num_groups, maxima, _INF), axis=0)).to(tl.int64)
        top = high
        while top - low > 1:
            middle = (low + top) >> 1
            found = tl.sum((maxima >= from_ordered(middle.to(tl.int32))).to(tl.int32), axis=0)
            low = tl.where(found >= k, middle, low)
            top = tl.where(found > k, top, tl.where(found == k, middle + 1, middle))
    smallest = from_ordered(low.to(tl.int32))
    count = list_groups(list_ptr, groups, (maxima >= smallest) & (groups < num_groups))
    while high - low > 1:
        middle = (low + high) >> 1
        threshold = from_ordered(middle.to(tl.int32))
        found = 0
        lowest = row_max  # of those found
        for start in range(0, count, TILE):
            _, values = load_listed(logits, scale, vocab_size, list_ptr, start, count, TILE)
            is_found = values >= threshold
            found += tl.sum(tl.sum(is_found.to(tl.int32), axis=1), axis=0)
            lowest = tl.minimum(lowest, tl.min(tl.min(tl.where(is_found, values, _INF), axis=1), axis=0))
        low = tl.where(found >= k, to_ordered(lowest).to(tl.int64), low)
        high = tl.where(found > k, high, tl.where(found == k, low + 1, middle))
    return from_ordered(low.to(tl.int32))


@triton.jit
def _score_listed(logits, scale, vocab_size, list_ptr, count, lowest, above, origin, scores_ptr, TILE: tl.constexpr):
    """Scores the listed groups by their tokens >= lowest and > above; returns these tokens' mass, in exp(origin).

    Weights are relative to the row's maximum. They vanish 87 below it, where nothing is drawn: Gumbel noise with 52
    bits lies between -3.7 and 36.8.
    """
    mass = 0.0
    for start in range(0, count, TILE):
        groups, values = load_listed(logits, scale, vocab_size, list_ptr, start, count, TILE)
        weights = tl.where((values >= lowest) & (values > above), tl.exp(values - origin), 0.0)
        sums = tl.sum(weights, axis=1)
        tl.store(scores_ptr + groups, origin + tl.log(sums), mask=start + tl.arange(0, TILE) < count)
        mass += tl.sum(sums, axis=0)
    tl.debug_barrier()
    return mass


@triton.jit
def _draw(
    logits,
    scale,
    vocab_size,
    num_groups,
    maxima,  # [PADDED_GROUPS], -inf behind the last group
    groups,  # [PADDED_GROUPS]
    top_k,
    top_p,
    min_p,
    seed,
    position,
    scores_ptr,
    list_ptr,
    TILE: tl.constexpr,
):
    """As `reference_sampling._draw`."""
    row_max = tl.max(maxima, axis=0)
    origin = exp_origin(row_max)
    lowest = tl.full([], -_INF, tl.float32)
    if min_p > 0:
        lowest = row_max + tl.log(min_p.to(tl.float64)).to(tl.float32)
    if top_k < vocab_size:
        kth = _kth_largest(logits, scale, vocab_size, num_groups, maxima, groups, row_max, top_k, list_ptr, TILE)
        lowest = tl.maximum(lowest, kth)
    above = tl.full([], -_INF, tl.float32)
    if lowest > -_INF:
        count = list_groups(list_ptr, groups, maxima >= lowest)
        kept = _score_listed(logits, scale, vocab_size, list_ptr, count, lowest, above, origin, scores_ptr, TILE)
    else:
        scores = tl.load(scores_ptr + groups, mask=groups < num_groups, other=-_INF)
        kept = tl.sum(tl.exp(scores - origin), axis=0)

    key = _mix(_mix(seed.to(tl.uint64) * _GOLDEN_GAMMA + _GOLDEN_GAMMA) + position.to(tl.uint64) * _GOLDEN_GAMMA)
    members = tl.arange(0, _GROUP_SIZE)
    token = 0
    first_column = tl.full([], 1, tl.uint64)
    drawing = True
    while drawing:
        scores = tl.load(scores_ptr + groups, mask=(maxima >= lowest) & (maxima > above), other=-_INF)
        noise = _gumbel_noise(key, first_column + groups.to(tl.uint64))
        group = tl.argmax(scores + noise, axis=0)
        ids = group * _GROUP_SIZE + members
        values = load_scaled(logits, ids, ids < vocab_size, scale)
        noise = _gumbel_noise(key, first_column + num_groups + members.to(tl.uint64))
        noisy = tl.where((values >= lowest) & (values > above), values + noise, -_INF)
        member = tl.argmax(noisy, axis=0)
        token = group * _GROUP_SIZE + member
        drawing = False
        if top_p < 1.0:
            # The mass of more probable tokens decides whether the token is in the nucleus; if not, only these are left.
            above = tl.max(tl.where(members == member, values, -_INF), axis=0)
            count = list_groups(list_ptr, groups, maxima > above)
            mass = _score_listed(logits, scale, vocab_size, list_ptr, count, lowest, above, origin, scores_ptr, TILE)
            drawing = (count > 0) & (mass >= top_p * kept)
            first_column += num_groups + _GROUP_SIZE
    return token


@triton.jit
def choose_token_kernel(
    logits_ptr,  # [S, vocab_size]
    rows_ptr,  # int32 [S], -1 = skip
    floats_ptr,  # fp32 [len(FloatParameter), max_num_seqs]
    top_k_ptr,  # int64 [max_num_seqs]
    seeds_ptr,  # int64 [max_num_seqs]
    token_ids_ptr,  # int32 [max_num_seqs, max_model_len]
    num_tokens_ptr,  # int64 [max_num_seqs]
    offsets_ptr,  # int32 [S], drafted tokens before the position; None = none, and the token is appended
    sampled_ptr,  # int64 [S]
    maxima_ptr,  # fp32 [S, num_groups]
    scores_ptr,  # fp32 [S, num_groups], overwritten
    list_ptr,  # int32 [S, num_groups], workspace
    vocab_size,
    num_groups,
    logits_stride,
    floats_stride,
    token_ids_stride,
    PADDED_GROUPS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (S,): chooses a token and, unless there are drafts, appends it to its row."""
    wait_for_inputs()
    launch_dependents()
    batch_index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + batch_index).to(tl.int64)
    if row < 0:
        return
    position = tl.load(num_tokens_ptr + row)
    if offsets_ptr is not None:
        position += tl.load(offsets_ptr + batch_index)
    temperature = tl.load(floats_ptr + _TEMPERATURE * floats_stride + row)
    logits = logits_ptr + batch_index * logits_stride
    groups = tl.arange(0, PADDED_GROUPS)
    first_group = batch_index * num_groups
    maxima = tl.load(maxima_ptr + first_group + groups, mask=groups < num_groups, other=-_INF)
    scores = tl.load(scores_ptr + first_group + groups, mask=groups < num_groups, other=0.0)
    is_broken = tl.max((scores != scores).to(tl.int32), axis=0) > 0
    token = 0
    if temperature > 0:
        token = _draw(
            logits,
            tl.div_rn(1.0, temperature),
            vocab_size,
            num_groups,
            maxima,
            groups,
            tl.load(top_k_ptr + row),
            tl.load(floats_ptr + _TOP_P * floats_stride + row),
            tl.load(floats_ptr + _MIN_P * floats_stride + row),
            tl.load(seeds_ptr + row),
            position,
            scores_ptr + first_group,
            list_ptr + first_group,
            TILE,
        )
    else:
        group = tl.argmax(maxima, axis=0)
        ids = group * _GROUP_SIZE + tl.arange(0, _GROUP_SIZE)
        token = group * _GROUP_SIZE + tl.argmax(load_scaled(logits, ids, ids < vocab_size, 1.0), axis=0)
    # The token in the row is the next step's input.
    tl.store(sampled_ptr + batch_index, tl.where(is_broken, _NOT_A_NUMBER, token).to(tl.int64))
    if offsets_ptr is None:
        tl.store(token_ids_ptr + row * token_ids_stride + position, tl.where(is_broken, 0, token))
        tl.store(num_tokens_ptr + row, position + 1)


def sample_tokens(
    logits: Tensor,
    rows: Tensor,
    floats: Tensor,
    top_k: Tensor,
    seeds: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    offsets: Tensor | None,
) -> Tensor:
    """Computes `reference.sample_tokens`; logits and token_ids have contiguous rows, the columns are contiguous."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == token_ids.stride(1) == 1, "rows of logits and token_ids must be contiguous"
    assert rows.dtype == token_ids.dtype == torch.int32, "rows and token_ids must be int32"
    assert top_k.dtype == seeds.dtype == num_tokens.dtype == torch.int64, "top_k, seeds, num_tokens must be int64"
    assert offsets is None or offsets.dtype == torch.int32, "offsets must be int32"
    assert floats.dtype == torch.float32 and len(floats) == len(FloatParameter), "floats must be fp32, one row each"
    columns = (rows, floats, top_k, seeds, num_tokens)
    assert all(column.is_contiguous() for column in columns), "columns must be contiguous"
    sampled = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return sampled
    maxima, scores = group_statistics(logits, rows, floats[FloatParameter.TEMPERATURE])
    groups = num_groups(vocab_size)
    choose_token_kernel[(num_rows,)](
        logits,
        rows,
        floats,
        top_k,
        seeds,
        token_ids,
        num_tokens,
        offsets,
        sampled,
        maxima,
        scores,
        torch.empty((num_rows, groups), dtype=torch.int32, device=logits.device),
        vocab_size,
        groups,
        logits.stride(0),
        floats.stride(0),
        token_ids.stride(0),
        **row_constants(vocab_size),
        num_warps=ROW_WARPS,
        **dependent_launch(logits.device),
    )
    return sampled


def specialization(
    dtype: torch.dtype, vocab_size: int, drafts: bool = False
) -> tuple[Any, dict[str, str], dict[str, Any], int]:
    """Returns (kernel, argument types, constants, num_warps) of the second launch, for ahead-of-time compilation.

    The first launch's is `token_groups.statistics_specialization`.
    """
    types = {
        "logits_ptr": f"*{TRITON_TYPES[dtype]}",
        "rows_ptr": "*i32",
        "floats_ptr": "*fp32",
        "top_k_ptr": "*i64",
        "seeds_ptr": "*i64",
        "token_ids_ptr": "*i32",
        "num_tokens_ptr": "*i64",
        "offsets_ptr": "*i32",
        "sampled_ptr": "*i64",
        "maxima_ptr": "*fp32",
        "scores_ptr": "*fp32",
        "list_ptr": "*i32",
        "vocab_size": "i32",
        "num_groups": "i32",
        "logits_stride": "i32",
        "floats_stride": "i32",
        "token_ids_stride": "i32",
    }
    constants: dict[str, Any] = row_constants(vocab_size)
    if not drafts:
        del types["offsets_ptr"]
        constants["offsets_ptr"] = None
    return choose_token_kernel, types, constants, ROW_WARPS
