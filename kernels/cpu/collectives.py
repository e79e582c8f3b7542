"""Collectives through shared memory in C++: argument checks, then one call."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.kernels.channel import channel_bytes
from pagewire.kernels.cpu.library import I, L, P, bind, dtype_code, threads_for

__all__ = ["all_gather", "all_reduce", "broadcast"]

_all_reduce = bind("all_reduce", I, P, L, P, I, I, I)
_all_gather = bind("all_gather", P, P, L, L, P, I, I, I)
_broadcast = bind("broadcast", P, L, I, P, I, I, I)


def all_reduce(x: Tensor, channel: Tensor, rank: int, size: int) -> None:
    _check(x, channel, rank, size)
    _all_reduce(dtype_code(x), x.data_ptr(), x.numel(), channel.data_ptr(), rank, size, threads_for(x.numel()))


def all_gather(x: Tensor, channel: Tensor, rank: int, size: int) -> Tensor:
    x = x.contiguous()
    _check(x, channel, rank, size)
    rows, columns = x.shape
    out = torch.empty((rows, size * columns), dtype=x.dtype)
    row_bytes = columns * x.element_size()
    _all_gather(
        *(x.data_ptr(), out.data_ptr(), row_bytes, x.nbytes),
        *(channel.data_ptr(), rank, size, threads_for(out.numel())),
    )
    return out


def broadcast(x: Tensor, root: int, channel: Tensor, rank: int, size: int) -> None:
    _check(x, channel, rank, size)
    if not 0 <= root < size:
        raise ValueError(f"root {root} is none of {size} ranks")
    _broadcast(x.data_ptr(), x.nbytes, root, channel.data_ptr(), rank, size, threads_for(x.numel()))


def _check(x: Tensor, channel: Tensor, rank: int, size: int) -> None:
    if not x.is_contiguous():
        raise ValueError(f"a collective takes contiguous tensors, not one with strides {x.stride()}")
    if channel.dtype is not torch.uint8 or channel.numel() < channel_bytes(size) or not channel.is_contiguous():
        raise ValueError(
            f"a channel of {size} ranks is uint8 [{channel_bytes(size)}], not {channel.dtype} {tuple(channel.shape)}"
        )
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is none of {size} ranks")
