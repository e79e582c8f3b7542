"""Collectives through shared memory in C++: argument checks, then one call."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.kernels.channel import SLOT_BYTES, channel_bytes
from pagewire.kernels.cpu.runtime.library import I, L, P, bind, dtype_code, threads_for

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast"]

_all_reduce = bind("all_reduce", I, P, L, P, I, I, I)
_all_gather = bind("all_gather", P, P, L, L, P, I, I, I)
_all_to_all = bind("all_to_all", P, L, P, P, P, I, I, I)
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
        x.data_ptr(),
        out.data_ptr(),
        row_bytes,
        x.nbytes,
        channel.data_ptr(),
        rank,
        size,
        threads_for(out.numel()),
    )
    return out


def all_to_all(x: Tensor, rows: Tensor, starts: Tensor, channel: Tensor, rank: int, size: int) -> None:
    _check(x, channel, rank, size)
    row_bytes = x.shape[1] * x.element_size()
    if not 0 < row_bytes <= SLOT_BYTES:
        raise ValueError(f"all_to_all takes rows of 1 to {SLOT_BYTES} bytes, not {row_bytes}")
    if rows.dtype is not torch.int32 or starts.dtype is not torch.int32 or starts.shape != (size * size + 1,):
        raise ValueError(
            f"all_to_all takes int32 rows and starts [{size * size + 1}], not {rows.dtype} and {starts.dtype} "
            f"{list(starts.shape)}"
        )
    rows, starts = rows.contiguous(), starts.contiguous()
    _all_to_all(
        x.data_ptr(),
        row_bytes,
        rows.data_ptr(),
        starts.data_ptr(),
        channel.data_ptr(),
        rank,
        size,
        threads_for(x.numel()),
    )


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
