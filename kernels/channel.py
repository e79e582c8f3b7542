"""Memory that the ranks of a group on one machine share: a channel, through which they compute together.

A channel is uint8 [channel_bytes(size)], zeros at first, mapped by `size` processes. Every rank calls the same ops
(`ops.collectives`) on it in the same order, one at a time. It has

    a line of 64 bytes     its first int32 is not 0 once the group has ended
    a line for each rank   int32 turn; int32 how many sleep until it changes; int64 nanoseconds that it has waited for
                           others; int64 [2] what it does in an even turn and in an odd one
    padding to 4096 bytes
    slots                  [size, 2, SLOT_BYTES]: what a rank gives to the others in an even turn and in an odd one

An op takes as many turns as its data fills slots. In each turn, a rank waits until all others have begun the previous
turn, and so have read its slot; fills the slot; increments its turn; and reads the others' slots once they have begun
the turn, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "LINE_BYTES",
    "SLOT_BYTES",
    "channel_bytes",
    "channel_ended",
    "channel_turns",
    "channel_waited",
    "end_channel",
    "slots_start",
]

LINE_BYTES, PAGE_BYTES, SLOT_BYTES = 64, 4096, 1 << 20  # as in cpu/csrc/collectives.cpp


def channel_bytes(size: int) -> int:
    """Returns the bytes of a channel for `size` ranks; pages that are not used take no memory."""
    return slots_start(size) + size * 2 * SLOT_BYTES


def slots_start(size: int) -> int:
    """Returns the offset in a channel at which the slots begin."""
    return -(-(1 + size) * LINE_BYTES // PAGE_BYTES) * PAGE_BYTES


def channel_ended(channel: Tensor) -> bool:
    """Returns whether ops on it have ended early, or will."""
    return bool(channel[:4].view(torch.int32).item())


def end_channel(channel: Tensor) -> None:
    """Makes every op on the channel return, in this and in other processes, now and later. Any thread may call it.

    A sleeping rank checks every few milliseconds.
    """
    channel[:4].view(torch.int32).fill_(1)


def channel_turns(channel: Tensor, size: int) -> list[int]:
    """Returns the number of turns that each rank has begun; the others wait for the lowest."""
    return [int(line.view(torch.int32)[0]) for line in _lines(channel, size)]


def channel_waited(channel: Tensor, rank: int) -> float:
    """Seconds that a rank has waited for others."""
    return int(_lines(channel, rank + 1)[rank].view(torch.int64)[1]) / 1e9


def _lines(channel: Tensor, size: int) -> tuple[Tensor, ...]:
    return channel[LINE_BYTES : (1 + size) * LINE_BYTES].split(LINE_BYTES)
