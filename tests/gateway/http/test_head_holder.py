"""The head of an answer is written with the first part of its body, or soon without it."""

import asyncio
from types import SimpleNamespace

import pytest

from pagewire.gateway.http.head_holder import HeadHolder


class Written:
    """A transport that notes what is written, piece by piece."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        assert not self.is_closed
        self.pieces.append(data)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
async def cycle() -> SimpleNamespace:
    cycle = SimpleNamespace(transport=Written(), response_started=False)
    cycle.socket, cycle.transport = cycle.transport, HeadHolder(cycle, asyncio.get_running_loop())
    return cycle


async def test_head_and_body_are_one_piece(cycle: SimpleNamespace) -> None:
    cycle.response_started = True
    for piece in (b"head ", b"first ", b"second"):
        cycle.transport.write(piece)
    assert cycle.socket.pieces == [b"head first ", b"second"]
    await asyncio.sleep(0)
    assert cycle.socket.pieces == [b"head first ", b"second"] and cycle.transport is cycle.socket


async def test_a_head_does_not_wait_for_a_late_body(cycle: SimpleNamespace) -> None:
    cycle.response_started = True
    cycle.transport.write(b"head ")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert cycle.socket.pieces == [b"head "]
    cycle.transport.write(b"body")
    assert cycle.socket.pieces == [b"head ", b"body"]


async def test_an_interim_answer_is_written_at_once(cycle: SimpleNamespace) -> None:
    cycle.transport.write(b"100 ")
    assert cycle.socket.pieces == [b"100 "]
    cycle.response_started = True
    cycle.transport.write(b"head ")
    cycle.transport.write(b"body")
    assert cycle.socket.pieces == [b"100 ", b"head body"]


async def test_closing_writes_the_head(cycle: SimpleNamespace) -> None:
    cycle.response_started = True
    cycle.transport.write(b"head ")
    cycle.transport.close()
    await asyncio.sleep(0)
    assert cycle.socket.pieces == [b"head "] and cycle.socket.is_closed
