"""Collectives through shared memory (`pagewire.kernels.ops.collectives`). Turns are waited for by looking again."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from pagewire.kernels.channel import LINE_BYTES, SLOT_BYTES, channel_ended, slots_start

_SUM, _GATHER, _COPY = 1, 2, 3
_LOOK_EVERY_S = 2e-5


def all_reduce(x: Tensor, channel: Tensor, rank: int, size: int) -> None:
    flat = x.view(-1)
    for part in flat.split(SLOT_BYTES // x.element_size()):
        total = torch.zeros(part.shape, dtype=torch.float32)
        for given in _exchange(part, _SUM, range(size), _Channel(channel, rank, size)):
            total += given
        part.copy_(total)


def all_gather(x: Tensor, channel: Tensor, rank: int, size: int) -> Tensor:
    flat = x.reshape(-1)
    out = x.new_empty(size, len(flat))
    most = SLOT_BYTES // x.element_size()
    for part, results in zip(flat.split(most), out.split(most, dim=1), strict=True):
        for of, given in enumerate(_exchange(part, _GATHER, range(size), _Channel(channel, rank, size))):
            results[of] = given
    return out.view(size, *x.shape).transpose(0, 1).reshape(x.shape[0], size * x.shape[1])


def broadcast(x: Tensor, root: int, channel: Tensor, rank: int, size: int) -> None:
    for part in x.view(-1).split(SLOT_BYTES // x.element_size()):
        for given in _exchange(part, _COPY, [root], _Channel(channel, rank, size)):
            part.copy_(given)


class _Channel:
    def __init__(self, channel: Tensor, rank: int, size: int) -> None:
        self.memory, self.rank, self.size = channel, rank, size
        lines = channel[LINE_BYTES : (1 + size) * LINE_BYTES].view(size, LINE_BYTES)
        self.turns = lines.view(torch.int32)[:, 0]
        self.meanings = lines.view(torch.int64)[:, 2:4]
        self.slots = channel[slots_start(size) :].view(size, 2, SLOT_BYTES)

    def wait(self, of: int, turn: int) -> bool:
        """False: the group has ended."""
        while not channel_ended(self.memory):
            if int(self.turns[of]) >= turn:
                return True
            time.sleep(_LOOK_EVERY_S)
        return False


def _exchange(part: Tensor, kind: int, roots: range | list[int], channel: _Channel) -> Iterator[Tensor]:
    """One turn: what each of the roots gives. Nothing, or less, if the group ends."""
    rank, turn = channel.rank, int(channel.turns[channel.rank]) + 1
    if not all(channel.wait(peer, turn - 1) for peer in range(channel.size)):
        return
    own = channel.slots[rank, turn % 2, : part.nbytes].view(part.dtype)
    if rank in roots:
        own.copy_(part)
    channel.meanings[rank, turn % 2] = part.nbytes * 4 + kind
    channel.turns[rank] = turn
    for root in roots:
        if not channel.wait(root, turn):
            return
        if channel.meanings[root, turn % 2] != channel.meanings[rank, turn % 2]:
            channel.memory[:4].view(torch.int32).fill_(2)
            return
        yield channel.slots[root, turn % 2, : part.nbytes].view(part.dtype)
