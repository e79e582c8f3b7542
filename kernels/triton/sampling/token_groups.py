"""The first pass of sampling and log probabilities on CUDA over the logits [S, vocab_size], in groups of 128.

`group_statistics` reads all logits once, with a grid fixed by shape, and leaves per group of neighbouring token ids
its maximum and log-sum-exp, 1/64 of the data. The further values that a second kernel, one program per row, needs (the
k-th largest, the mass or number of tokens above a value) depend on few groups, which the maxima determine: it lists
these and reads their logits again: a few groups of a peaked distribution, all of a flat one; nothing is sorted.

Lists are in global memory, written and read by the same program with a barrier in between.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.reference.sampling import GROUP_SIZE
from pagewire.kernels.triton.common.launch import dependent_launch, launch_dependents, wait_for_inputs

TRITON_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

_GROUP_SIZE = tl.constexpr(GROUP_SIZE)
_INF = tl.constexpr(float("inf"))
_WARPS = 4
# Of the second kernels, one program per row.
ROW_WARPS = 8
_ROW_TILE = 32  # groups read at a time: 16 logits per thread


@triton.jit
def load_scaled(logits, ids, mask, scale):
    """Returns logits[ids] * scale in fp32; -inf where masked or NaN, so that even a broken model's token lies in its
    row."""
    values = tl.load(logits + ids, mask=mask, other=-_INF).to(tl.float32) * scale
    return tl.where(values == values, values, -_INF)


@triton.jit
def exp_origin(maximum):
    """Returns what is subtracted before exp(): the maximum, or 0 where that is infinite and the difference would be
    NaN."""
    return tl.where(tl.abs(maximum) < _INF, maximum, 0.0)


@triton.jit
def group_statistics_kernel(
    logits_ptr,  # [S, vocab_size]
    rows_ptr,  # int32 [S], -1 = skip; None = all with temperature 1
    temperature_ptr,  # fp32 [max_num_seqs]
    maxima_ptr,  # fp32 [S, num_groups]
    scores_ptr,  # fp32 [S, num_groups]: log-sum-exp, NaN of a group that has one
    vocab_size,
    num_groups,
    logits_stride,
    TILE: tl.constexpr,  # groups per program
):
    """Grid (groups / TILE, S). Of logits / temperature; of the logits as they are where the temperature is 0."""
    wait_for_inputs()
    launch_dependents()
    batch_index = tl.program_id(1).to(tl.int64)
    scale = 1.0
    if rows_ptr is not None:
        row = tl.load(rows_ptr + batch_index)
        if row < 0:
            return
        temperature = tl.load(temperature_ptr + row)
        scale = tl.div_rn(1.0, tl.where(temperature > 0, temperature, 1.0))
    groups = tl.program_id(0) * TILE + tl.arange(0, TILE)
    ids = groups[:, None] * _GROUP_SIZE + tl.arange(0, _GROUP_SIZE)[None, :]
    logits = logits_ptr + batch_index * logits_stride
    values = tl.load(logits + ids, mask=ids < vocab_size, other=-_INF).to(tl.float32) * scale
    maxima = tl.max(values, axis=1)  # NaN if there is nothing else: of two it takes the number
    maxima = tl.where(maxima == maxima, maxima, -_INF)
    origins = exp_origin(maxima)
    scores = origins + tl.log(tl.sum(tl.exp(values - origins[:, None]), axis=1))
    in_row = groups < num_groups
    tl.store(maxima_ptr + batch_index * num_groups + groups, maxima, mask=in_row)
    tl.store(scores_ptr + batch_index * num_groups + groups, scores, mask=in_row)


@triton.jit
def list_groups(list_ptr, groups, wanted):
    """Writes the wanted ones of `groups` to the list; returns how many."""
    chosen = wanted.to(tl.int32)
    tl.store(list_ptr + tl.cumsum(chosen, axis=0) - 1, groups, mask=wanted)
    tl.debug_barrier()
    return tl.sum(chosen, axis=0)


@triton.jit
def load_listed(logits, scale, vocab_size, list_ptr, start, count, TILE: tl.constexpr):
    """The groups list[start : start + TILE] (those before `count`) and their logits [TILE, GROUP_SIZE]."""
    index = start + tl.arange(0, TILE)
    groups = tl.load(list_ptr + index, mask=index < count, other=0)
    ids = groups[:, None] * _GROUP_SIZE + tl.arange(0, _GROUP_SIZE)[None, :]
    mask = (index < count)[:, None] & (ids < vocab_size)
    return groups, load_scaled(logits, ids, mask, scale)


def num_groups(vocab_size: int) -> int:
    return triton.cdiv(vocab_size, GROUP_SIZE)


def row_constants(vocab_size: int) -> dict[str, int]:
    """Returns what a second kernel is compiled for."""
    return {"PADDED_GROUPS": triton.next_power_of_2(num_groups(vocab_size)), "TILE": _ROW_TILE}


def group_statistics(logits: Tensor, rows: Tensor | None, temperature: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns (maxima, log-sum-exps), both fp32 [S, num_groups], of logits [S, vocab_size] / temperature. NaN is in no
    maximum, and in the log-sum-exp of its group.

    rows int32 [S] and temperature fp32 [max_num_seqs] go together; None = the logits as they are. A temperature of 0
    counts as 1; the values of padded rows (-1) are undefined.
    """
    num_rows, vocab_size = logits.shape
    groups = num_groups(vocab_size)
    # Not halves of one: the second would begin at a multiple of 16 bytes for some num_rows only, and Triton compiles
    # every kernel that gets it for either case, the rarer one while serving.
    maxima, scores = (torch.empty((num_rows, groups), dtype=torch.float32, device=logits.device) for _ in range(2))
    tile = statistics_tile(num_rows, groups)
    group_statistics_kernel[(triton.cdiv(groups, tile), num_rows)](
        logits,
        rows,
        temperature,
        maxima,
        scores,
        vocab_size,
        groups,
        logits.stride(0),
        TILE=tile,
        num_warps=_WARPS,
        **dependent_launch(logits.device),
    )
    return maxima, scores


def statistics_tile(num_rows: int, groups: int) -> int:
    """Groups per program: 16 KiB of fp32 logits, or 4 KiB where there would be too few programs for a large device."""
    return 32 if num_rows * groups >= 32 * 1024 else 8


def statistics_specialization(
    dtype: torch.dtype, *, tile: int, has_rows: bool
) -> tuple[Any, dict[str, str], dict[str, Any], int]:
    """Returns (kernel, argument types, constants, num_warps) of a launch, for ahead-of-time compilation."""
    types = {
        "logits_ptr": f"*{TRITON_TYPES[dtype]}",
        "rows_ptr": "*i32",
        "temperature_ptr": "*fp32",
        "maxima_ptr": "*fp32",
        "scores_ptr": "*fp32",
        "vocab_size": "i32",
        "num_groups": "i32",
        "logits_stride": "i32",
    }
    constants: dict[str, Any] = {"TILE": tile}
    if not has_rows:
        for name in ("rows_ptr", "temperature_ptr"):
            del types[name]
            constants[name] = None
    return group_statistics_kernel, types, constants, _WARPS
