"""Pipes between two ranks: for the stream from stage to stage of a pipeline, and for tokens from its end to its start.

The sender does not wait for the receiver unless the pipe is full; the receiver waits for messages. On one machine the
tensors are in memory that both processes have mapped, and a socket announces them: a waiting rank sleeps, and wakes if
the other one ends.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes


class PeerLost(RuntimeError):
    """The other rank has ended."""


class Pipe(Protocol):
    """One end of a pipe. Messages arrive in order, and both ends know shapes and dtypes of the tensors."""

    def send(self, numbers: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """Sends a message. The tensors may be overwritten afterwards. Raises PeerLost."""

    def receive(self, tensors: Sequence[Tensor], num_numbers: int = 0) -> tuple[int, ...]:
        """Waits for a message, writes its tensors to these, of the same shapes and dtypes, and returns its numbers.
        Raises PeerLost."""


# Makes an end of a pipe for messages with tensors of at most this many bytes each.
PipeEnd = Callable[[Sequence[int]], Pipe]


@dataclass(frozen=True)
class Pipes:
    """The ends that a rank has: to the neighbouring stages, and for sampled ids, which go from the leader to each rank
    of the first stage, or of all stages but its own."""

    before: PipeEnd | None = None
    behind: PipeEnd | None = None
    tokens: Sequence[PipeEnd] = ()


NO_PIPES = Pipes()


class SharedPipe:
    """A pipe between two processes of one machine: a ring of messages in memory. The receiver frees a place by a byte
    that it sends back."""

    def __init__(self, connection: socket.socket, descriptor: int, num_places: int, most_bytes: Sequence[int]) -> None:
        """connection: one end of a pair of stream sockets. descriptor: the memory that both ends have, not sized yet.
        most_bytes: the limit of each tensor of a message."""
        self._connection = connection
        self._place_bytes, self._num_places = sum(map(_padded, most_bytes)), num_places
        num_bytes = max(1, num_places * self._place_bytes)
        os.ftruncate(descriptor, num_bytes)  # the other end sets the same size
        self._memory = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
        self._next = 0
        self._num_free = num_places  # as the sender knows it

    def send(self, numbers: Sequence[int], tensors: Sequence[Tensor]) -> None:
        if not self._num_free:
            self._num_free += len(self._receive_bytes(1))
        self._num_free -= 1
        for place, tensor in zip(self._places(tensors), tensors, strict=True):
            place.copy_(_as_bytes(tensor))
        try:
            self._connection.sendall(struct.pack(f"<q{len(numbers)}q", len(numbers), *numbers))
        except OSError as error:
            raise PeerLost(str(error)) from error

    def receive(self, tensors: Sequence[Tensor], num_numbers: int = 0) -> tuple[int, ...]:
        (count,) = struct.unpack("<q", self._receive_bytes(8))
        numbers = struct.unpack(f"<{count}q", self._receive_bytes(8 * count))
        for place, tensor in zip(self._places(tensors), tensors, strict=True):
            _as_bytes(tensor).copy_(place)
        try:
            self._connection.sendall(b"\0")
        except OSError as error:
            raise PeerLost(str(error)) from error
        return numbers

    def _places(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the memory of these tensors in the next message."""
        start, places = self._next * self._place_bytes, []
        self._next = (self._next + 1) % self._num_places
        for tensor in tensors:
            places.append(self._memory[start : start + tensor.nbytes])
            start += _padded(tensor.nbytes)
        return places

    def _receive_bytes(self, count: int) -> bytes:
        received = b""
        while len(received) < count:
            try:
                part = self._connection.recv(count - len(received))
            except OSError as error:
                raise PeerLost(str(error)) from error
            if not part:
                raise PeerLost("the other rank has closed its end")
            received += part
        return received


def make_memory() -> int:
    """Returns the descriptor of new anonymous memory."""
    return os.memfd_create("pagewire-pipe", os.MFD_CLOEXEC)


def _as_bytes(tensor: Tensor) -> Tensor:
    assert tensor.is_contiguous()
    return tensor.view(-1).view(torch.uint8)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
