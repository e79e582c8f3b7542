"""Some of the outputs, or of the inputs, of a quantized weight."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels.quantized.weights import (
    FP8_BLOCK,
    SHARED_FIELDS,
    SUPER_SIZE,
    Fp8Weight,
    GroupedWeight,
    Weight,
)

__all__ = ["columns", "rows", "take_rows"]


def rows(weight: Weight, start: int, stop: int) -> Weight:
    """Returns outputs [start, stop) of a weight, as views; with scales per block, start must be a multiple of 128."""
    part: dict[str, Any] = {
        field.name: value[start:stop]
        for field in fields(weight)
        if isinstance(value := getattr(weight, field.name), Tensor) and field.name not in SHARED_FIELDS
    }
    if isinstance(weight, Fp8Weight) and weight.scales.dim() == 2:
        part["scales"] = weight.scales[start // FP8_BLOCK : -(-stop // FP8_BLOCK)]
    return replace(weight, **part)


def take_rows(weight: Weight, order: Tensor) -> Weight:
    """Returns the outputs in another order, int64 [N]: output i is row order[i].

    Raises ValueError for scales per block if rows of one block would come from several.
    """
    order = order.to(weight.scales.device)
    orders: dict[str, Tensor] = {}
    if isinstance(weight, Fp8Weight) and weight.scales.dim() == 2:
        blocks = order // FP8_BLOCK
        orders["scales"] = blocks[::FP8_BLOCK]
        if not torch.equal(orders["scales"].repeat_interleave(FP8_BLOCK)[: len(blocks)], blocks):
            raise ValueError(f"rows of one block of {FP8_BLOCK} would come from several")
    taken: dict[str, Any] = {
        field.name: _take(value, orders.get(field.name, order))
        for field in fields(weight)
        if isinstance(value := getattr(weight, field.name), Tensor) and field.name not in SHARED_FIELDS
    }
    return replace(weight, **taken)


def _take(tensor: Tensor, order: Tensor) -> Tensor:
    if tensor.dtype.itemsize == 1:  # not every torch build can index fp8
        return tensor.view(torch.uint8)[order].view(tensor.dtype)
    return tensor[order]


def columns(weight: Weight, start: int, stop: int) -> Weight:
    """Returns inputs [start, stop) of a weight; they must be whole groups (of 128 or 256 inputs, where scales are per
    block or have scales themselves), and those of a weight without permutation.
    """
    sizes = {"codes": 1, "weight": 1, "super_scales": SUPER_SIZE, "super_offsets": SUPER_SIZE}
    changed: dict[str, Any] = {}
    if isinstance(weight, GroupedWeight):
        assert weight.permutation is None
        sizes |= {"scales": weight.group_size, "offsets": weight.group_size}
        if weight.group_size >= weight.shape[1]:  # of any inputs
            sizes, changed = {"codes": 1}, {"group_size": stop - start}
    elif isinstance(weight, Fp8Weight) and weight.scales.dim() == 2:
        sizes["scales"] = FP8_BLOCK
    for name, size in sizes.items():
        if (tensor := getattr(weight, name, None)) is None:
            continue
        if start % size:
            raise ValueError(f"input {start} is within a group of {size}")
        changed[name] = tensor[:, start // size : -(-stop // size)].contiguous()
    return replace(weight, **changed)
