"""Adapters in C++: argument checks, then one call."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.kernels.cpu.runtime.library import I, L, P, bind, dtype_code

__all__ = ["add_adapters"]

_add_adapters = bind("add_adapters", I, I, I, *[P] * 7, *[L] * 8, I)


def add_adapters(
    out: Tensor, x: Tensor, down: Tensor, up: Tensor, slots: Tensor, starts: Tensor, ranks: Tensor
) -> None:
    num_slots, num_parts, rank, num_inputs = down.shape
    num_tokens, num_outputs = out.shape
    expected = (
        ("x", x, (num_tokens, num_inputs), x.dtype),
        ("up", up, (num_slots, rank, num_outputs), down.dtype),
        ("slots", slots, (num_tokens,), torch.int32),
        ("starts", starts, (num_parts + 1,), torch.int32),
        ("ranks", ranks, (num_slots, num_parts), torch.int32),
    )
    for name, tensor, shape, dtype in expected:
        if tensor.shape != shape or tensor.dtype is not dtype:
            raise ValueError(
                f"add_adapters: {name} must be {dtype} {list(shape)}, not {tensor.dtype} {list(tensor.shape)}"
            )
    if not all(tensor.is_contiguous() for tensor in (down, up, slots, starts, ranks)):
        raise ValueError("add_adapters: down, up, slots, starts and ranks must be contiguous")
    if out.stride(1) != 1 or x.stride(1) != 1:
        raise ValueError("add_adapters: rows of out and x must be contiguous")
    if num_tokens and (highest := int(slots.aminmax().max)) >= num_slots:  # recorded steps skip it
        raise IndexError(f"add_adapters: there is no slot {highest} of {num_slots}")
    _add_adapters(
        dtype_code(out),
        dtype_code(x),
        dtype_code(down),
        out.data_ptr(),
        x.data_ptr(),
        down.data_ptr(),
        up.data_ptr(),
        slots.data_ptr(),
        starts.data_ptr(),
        ranks.data_ptr(),
        num_tokens,
        num_inputs,
        num_outputs,
        num_slots,
        num_parts,
        rank,
        x.stride(0),
        out.stride(0),
        torch.get_num_threads(),
    )
