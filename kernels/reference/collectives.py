"""Collectives through shared memory (`pagewire.kernels.ops.collectives`). Ranks wait for turns by polling."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from pagewire.kernels.channel import LINE_BYTES, SLOT_BYTES, channel_ended, slots_start
from pagewire.kernels.peer_memory import FLAGS_START, HALF_BYTES, MOST_RANKS, PART_BYTES, PEER_BYTES

_EXCHANGE, _SUM, _GATHER, _COPY = range(4)
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


def all_to_all(x: Tensor, rows: Tensor, starts: Tensor, channel: Tensor, rank: int, size: int) -> None:
    bounds, places = starts.tolist(), rows.long()
    meaning = sum((index + 1) * start for index, start in enumerate(bounds)) * 4 + _EXCHANGE

    def sent(by: int) -> list[tuple[int, Tensor]]:
        """Returns (receiver, rows), in this order"""
        edges = ((to, to * size + by) for to in range(size) if to != by)
        return [(to, places[bounds[edge] : bounds[edge + 1]]) for to, edge in edges]

    of_all = [sent(by) for by in range(size)]
    counts = [sum(len(chosen) for _, chosen in of_one) for of_one in of_all]
    most = SLOT_BYTES // max(1, x[:1].nbytes)
    for begin in range(0, max(counts), most):
        parts = [torch.cat([chosen for _, chosen in of_one])[begin : begin + most] for of_one in of_all]
        turn = _begin(x[parts[rank]], meaning, memory := _Channel(channel, rank, size))
        if turn is None:
            return
        for by, chosen in enumerate(parts):
            receivers = torch.cat([torch.full_like(part, to) for to, part in of_all[by]])[begin : begin + most]
            if not bool((own := receivers == rank).any()):
                continue
            if (given := _given(by, turn, x.dtype, x[chosen].nbytes, memory)) is None:
                return
            x[chosen[own]] = given.view(len(chosen), -1)[own]


def peer_all_reduce(x: Tensor, peers: Tensor, epochs: Tensor, rank: int) -> None:
    memories = [_memory_at(address) for address in peers.tolist()]
    for index, part in enumerate(x.view(-1).split(PART_BYTES // x.element_size())):
        epoch = int(epochs[index]) + 1
        start = epoch % 2 * HALF_BYTES + index * PART_BYTES
        given = [memory[start : start + part.nbytes].view(x.dtype) for memory in memories]
        flags = [memory[FLAGS_START:].view(torch.int32).view(-1, MOST_RANKS)[index] for memory in memories]
        given[rank].copy_(part)
        for of_peer in flags:
            of_peer[rank] = epoch
        while bool((flags[rank][: len(peers)] < epoch).any()):
            time.sleep(_LOOK_EVERY_S)
        part.copy_(_sum_in_order(given))
        epochs[index] = epoch


def _sum_in_order(parts: list[Tensor]) -> Tensor:
    total = torch.zeros(parts[0].shape, dtype=torch.float32)
    for part in parts:
        total += part
    return total


def _memory_at(address: int) -> Tensor:
    return torch.frombuffer((ctypes.c_uint8 * PEER_BYTES).from_address(address), dtype=torch.uint8)


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
    gives = channel.rank in roots
    turn = _begin(part if gives else part[:0], part.nbytes * 4 + kind, channel)
    for root in roots:
        if turn is None or (given := _given(root, turn, part.dtype, part.nbytes, channel)) is None:
            return
        yield given


def _begin(part: Tensor, meaning: int, channel: _Channel) -> int | None:
    """Gives the others `part` in the next turn, which is returned. None: the group has ended."""
    rank, turn = channel.rank, int(channel.turns[channel.rank]) + 1
    if not all(channel.wait(peer, turn - 1) for peer in range(channel.size)):
        return None
    channel.slots[rank, turn % 2, : part.nbytes].view(part.dtype).copy_(part.view(-1))
    channel.meanings[rank, turn % 2] = meaning
    channel.turns[rank] = turn
    return turn


def _given(root: int, turn: int, dtype: torch.dtype, num_bytes: int, channel: _Channel) -> Tensor | None:
    """What the root gives in this turn. None: the group has ended, or does now, as it does something else."""
    if not channel.wait(root, turn):
        return None
    if channel.meanings[root, turn % 2] != channel.meanings[channel.rank, turn % 2]:
        channel.memory[:4].view(torch.int32).fill_(2)
        return None
    return channel.slots[root, turn % 2, :num_bytes].view(dtype)
