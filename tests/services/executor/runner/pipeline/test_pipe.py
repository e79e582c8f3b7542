"""Messages between processes: whole, in order, and with an end where the other one is gone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading

import pytest
import torch

from pagewire.services.executor.parallel.pipe import PeerLost, SharedPipe, make_memory

NUM_PLACES = 3
MOST_BYTES = [64 * 33 * 2, 5 * 8]
SIZES = [(5, 7), (1, 3), (64, 33), (2, 1)]


def messages(count: int) -> list[tuple[tuple[int, ...], list[torch.Tensor]]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            tuple(range(i % 4)),
            [
                torch.randn(SIZES[i % len(SIZES)], generator=generator).bfloat16(),
                torch.randint(0, 1 << 40, (i % 5,), generator=generator),
            ],
        )
        for i in range(count)
    ]


def pair() -> tuple[socket.socket, socket.socket, int]:
    one, other = socket.socketpair()
    return one, other, make_memory()


def send_all(connection: socket.socket, descriptor: int, count: int) -> None:
    pipe = SharedPipe(connection, descriptor, NUM_PLACES, MOST_BYTES)
    for numbers, tensors in messages(count):
        pipe.send(numbers, tensors)
    signal.pause()  # it lives until it is killed


def receive(pipe: SharedPipe, tensors: list[torch.Tensor]) -> tuple[tuple[int, ...], list[torch.Tensor]]:
    received = [torch.empty_like(tensor) for tensor in tensors]
    return pipe.receive(received), received


def test_messages_of_another_process_come_whole_and_in_order_and_its_death_is_noticed() -> None:
    one, other, descriptor = pair()
    process = multiprocessing.get_context("fork").Process(target=send_all, args=(one, descriptor, 40), daemon=True)
    process.start()
    one.close()
    pipe = SharedPipe(other, descriptor, NUM_PLACES, MOST_BYTES)
    for numbers, tensors in messages(40):
        found, received = receive(pipe, tensors)
        assert found == numbers
        for tensor, expected in zip(received, tensors, strict=True):
            assert torch.equal(tensor, expected)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(PeerLost):
        pipe.receive([torch.empty(1)])
    process.join()


def test_the_sender_waits_for_a_free_place() -> None:
    one, other, descriptor = pair()
    sender, receiver = (
        SharedPipe(one, descriptor, NUM_PLACES, MOST_BYTES),
        SharedPipe(other, descriptor, NUM_PLACES, MOST_BYTES),
    )
    sent: list[int] = []

    def send() -> None:
        for i in range(NUM_PLACES + 2):
            sender.send((i,), [torch.full((3,), i)])
            sent.append(i)

    thread = threading.Thread(target=send)
    thread.start()
    for i in range(NUM_PLACES + 2):
        (number,), (tensor,) = receive(receiver, [torch.empty(3, dtype=torch.int64)])
        assert number == i and tensor.tolist() == [i] * 3
    thread.join(10)
    assert sent == list(range(NUM_PLACES + 2))
