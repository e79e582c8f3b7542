"""The op add_adapters on CUDA: two kernels, `low = down x` and `out += up low`, for all parts of a layer's outputs.

A program has 16 neighbouring tokens and computes for those that have a slot; others have the same tokens and the other
slots. Where tokens are few, up to 64 programs share the slots; where they are many, neighbours mostly have the same
slot, and a program looks for one after the other, from the least to the greatest that its tokens have. The grid follows
from shapes alone, and tiles do not depend on the number of tokens: a token's result is the same in every step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton.common.launch import dependent_launch, launch_dependents, wait_for_inputs
from pagewire.kernels.triton.common.specialization import Specialization

_TOKENS = 16  # of a program: the fewest rows of a matrix instruction
_FEW_TOKENS = 256  # up to which several programs share the slots
_MAX_SLOT_PROGRAMS = 64  # each expert has its slots: a thousand of them, of which most have no token, are common
_SPLIT_INPUTS = 512  # of a program: few tokens of few slots would not fill a GPU otherwise
_MAX_SPLITS = 8
_SHRINK, _EXPAND = {"num_warps": 4, "num_stages": 3}, {"num_warps": 4, "num_stages": 2}


@triton.jit(do_not_specialize=["num_tokens", "slot_step"])
def shrink_kernel(
    x_ptr,  # [num_tokens, input_stride]
    down_ptr,  # [num_slots, NUM_PARTS, RANK, input_stride]
    slots_ptr,  # [num_tokens]
    ranks_ptr,  # [num_slots, NUM_PARTS]
    low_ptr,  # fp32 [SPLITS, num_tokens, NUM_PARTS, RANK]
    num_tokens,
    slot_step,
    input_stride,  # their number
    x_stride,
    NUM_PARTS: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (block of tokens; split, part and block of ranks; first slot)."""
    wait_for_inputs()
    launch_dependents()
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    slots = tl.load(slots_ptr + tokens, mask=tokens < num_tokens, other=-1)
    greatest = tl.max(slots, axis=0)
    if greatest < 0:
        return
    least = tl.min(tl.where(slots < 0, greatest, slots), axis=0)
    RANK_BLOCKS: tl.constexpr = (RANK + BLOCK_R - 1) // BLOCK_R
    item = tl.program_id(1)
    ranks = item % RANK_BLOCKS * BLOCK_R + tl.arange(0, BLOCK_R)
    part = item // RANK_BLOCKS % NUM_PARTS
    split = item // (RANK_BLOCKS * NUM_PARTS)
    steps = tl.cdiv(input_stride, BLOCK_K)
    inputs = tl.arange(0, BLOCK_K)
    IS_WIDE: tl.constexpr = x_ptr.dtype.element_ty != down_ptr.dtype.element_ty or x_ptr.dtype.element_ty == tl.float32
    for slot in range(least + tl.program_id(2), greatest + 1, slot_step):
        here = slots == slot
        used = tl.load(ranks_ptr + slot * NUM_PARTS + part)
        if (tl.max(here.to(tl.int32), axis=0) > 0) & (item % RANK_BLOCKS * BLOCK_R < used):
            x_rows = x_ptr + tokens.to(tl.int64)[:, None] * x_stride + inputs[None, :]
            rows = ((slot * NUM_PARTS + part) * RANK + ranks).to(tl.int64)
            down_rows = down_ptr + rows[None, :] * input_stride + inputs[:, None]
            acc = tl.zeros([BLOCK_T, BLOCK_R], dtype=tl.float32)
            for step in range(split * steps // SPLITS, (split + 1) * steps // SPLITS):
                start = step * BLOCK_K
                in_row = start + inputs < input_stride
                x = tl.load(x_rows + start, mask=here[:, None] & in_row[None, :], other=0.0)
                down = tl.load(down_rows + start, mask=(ranks < used)[None, :] & in_row[:, None], other=0.0)
                if IS_WIDE:
                    acc = tl.dot(x.to(tl.float32), down.to(tl.float32), acc, input_precision="ieee")
                else:
                    acc = tl.dot(x, down, acc)
            low_row = (split * num_tokens + tokens).to(tl.int64) * NUM_PARTS + part
            target = low_ptr + low_row[:, None] * RANK + ranks[None, :]
            tl.store(target, acc, mask=here[:, None] & (ranks < used)[None, :])


@triton.jit(do_not_specialize=["num_tokens", "slot_step"])
def expand_kernel(
    out_ptr,  # [num_tokens, output_stride]
    low_ptr,  # fp32 [SPLITS, num_tokens, NUM_PARTS, RANK]
    up_ptr,  # [num_slots, RANK, output_stride]
    slots_ptr,
    starts_ptr,  # [NUM_PARTS + 1]
    ranks_ptr,
    num_tokens,
    slot_step,
    output_stride,  # their number
    out_stride,
    NUM_PARTS: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (block of tokens, block of outputs, first slot)."""
    wait_for_inputs()
    launch_dependents()
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    slots = tl.load(slots_ptr + tokens, mask=tokens < num_tokens, other=-1)
    greatest = tl.max(slots, axis=0)
    if greatest < 0:
        return
    least = tl.min(tl.where(slots < 0, greatest, slots), axis=0)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ranks = tl.arange(0, BLOCK_R)
    target = out_ptr + tokens.to(tl.int64)[:, None] * out_stride + outputs[None, :]
    for slot in range(least + tl.program_id(2), greatest + 1, slot_step):
        here = slots == slot
        if tl.max(here.to(tl.int32), axis=0) > 0:
            acc = tl.zeros([BLOCK_T, BLOCK_N], dtype=tl.float32)
            touched = outputs < 0  # that have a product
            for part in range(NUM_PARTS):
                used = tl.load(ranks_ptr + slot * NUM_PARTS + part)
                begin, end = tl.load(starts_ptr + part), tl.load(starts_ptr + part + 1)
                own = (outputs >= begin) & (outputs < end)
                if (used > 0) & (tl.max(own.to(tl.int32), axis=0) > 0):
                    touched |= own
                    for first in range(0, used, BLOCK_R):
                        in_rank = first + ranks < used
                        low = tl.zeros([BLOCK_T, BLOCK_R], dtype=tl.float32)
                        for split in tl.static_range(SPLITS):
                            low_row = (split * num_tokens + tokens).to(tl.int64) * NUM_PARTS + part
                            source = low_ptr + low_row[:, None] * RANK + (first + ranks)[None, :]
                            low += tl.load(source, mask=here[:, None] & in_rank[None, :], other=0.0)
                        up_rows = (slot * RANK + first + ranks).to(tl.int64)
                        up = tl.load(
                            up_ptr + up_rows[:, None] * output_stride + outputs[None, :],
                            mask=in_rank[:, None] & own[None, :],
                            other=0.0,
                        )
                        acc = tl.dot(low, up.to(tl.float32), acc, input_precision="ieee")
            mask = here[:, None] & touched[None, :]
            base = tl.load(target, mask=mask, other=0.0).to(tl.float32)
            tl.store(target, (base + acc).to(out_ptr.dtype.element_ty), mask=mask)


def add_adapters(
    out: Tensor, x: Tensor, down: Tensor, up: Tensor, slots: Tensor, starts: Tensor, ranks: Tensor
) -> None:
    """Computes `reference.add_adapters`; out and x may have any stride between rows."""
    num_slots, num_parts, rank, num_inputs = down.shape
    num_tokens, num_outputs = out.shape
    assert x.shape == (num_tokens, num_inputs) and slots.shape == (num_tokens,), "x and slots must be of out's tokens"
    assert up.shape == (num_slots, rank, num_outputs) and up.dtype is down.dtype, "up must be [slots, rank, outputs]"
    assert down.is_contiguous() and up.is_contiguous(), "down and up must be contiguous"
    assert x.stride(1) == 1 and out.stride(1) == 1, "rows of out and x must be contiguous"
    if num_tokens == 0:
        return
    shrink, expand = _constants(num_parts, rank, num_inputs)
    splits = shrink["SPLITS"]
    low = torch.empty(splits, num_tokens, num_parts, rank, dtype=torch.float32, device=x.device)
    blocks = triton.cdiv(num_tokens, _TOKENS)
    slot_step = min(num_slots, _MAX_SLOT_PROGRAMS) if num_tokens <= _FEW_TOKENS else 1
    early = dependent_launch(x.device)
    shrink_kernel[(blocks, splits * num_parts * triton.cdiv(rank, shrink["BLOCK_R"]), slot_step)](
        x, down, slots, ranks, low, num_tokens, slot_step, num_inputs, x.stride(0), **shrink, **_SHRINK,
        **early,
    )  # fmt: skip
    expand_kernel[(blocks, triton.cdiv(num_outputs, expand["BLOCK_N"]), slot_step)](
        out, low, up, slots, starts, ranks, num_tokens, slot_step, num_outputs, out.stride(0), **expand,
        **_EXPAND, **early,
    )  # fmt: skip


def _constants(num_parts: int, rank: int, num_inputs: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns those of both kernels."""
    shared = {
        "NUM_PARTS": num_parts,
        "RANK": rank,
        "SPLITS": min(_MAX_SPLITS, triton.cdiv(num_inputs, _SPLIT_INPUTS)),
        "BLOCK_T": _TOKENS,
    }
    block_r = max(16, min(64, triton.next_power_of_2(rank)))
    return shared | {"BLOCK_R": block_r, "BLOCK_K": 128}, shared | {"BLOCK_R": min(32, block_r), "BLOCK_N": 128}


def specializations(dtype: str, num_parts: int, rank: int, num_inputs: int) -> tuple[Specialization, Specialization]:
    """Returns what `add_adapters` launches, to compile it ahead of time. dtype: of x, out and weights."""
    shrink, expand = _constants(num_parts, rank, num_inputs)
    counts = {"num_tokens": "i32", "slot_step": "i32"}
    slots, starts, ranks = ({f"{name}_ptr": "*i32"} for name in ("slots", "starts", "ranks"))
    data = {f"{name}_ptr": f"*{dtype}" for name in ("x", "down")}
    shrink_types = {**data, **slots, **ranks, "low_ptr": "*fp32", **counts, "input_stride": "i32", "x_stride": "i32"}
    expand_types = {"out_ptr": f"*{dtype}", "low_ptr": "*fp32", "up_ptr": f"*{dtype}", **slots, **starts, **ranks}
    expand_types |= {**counts, "output_stride": "i32", "out_stride": "i32"}
    return (
        Specialization(shrink_kernel, shrink_types, shrink, **_SHRINK),
        Specialization(expand_kernel, expand_types, expand, **_EXPAND),
    )
