"""The head of an answer, which goes to the socket together with the first part of its body."""

import asyncio
from typing import Any


class HeadHolder:
    """The transport of an answer until its head is written.

    uvicorn writes head and body separately, and each write is a system call, a packet, and a wake-up of the client.
    The head waits for a body until the tasks that are ready have run.
    """

    def __init__(self, cycle: Any, loop: asyncio.AbstractEventLoop) -> None:
        """cycle: uvicorn's, which gets its own transport back with the head."""
        self._cycle = cycle
        self._transport: asyncio.Transport = cycle.transport
        self._loop = loop
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._head or not self._cycle.response_started:  # otherwise it is the head
            self._transport.write(self._head + data)
            self._give_back()
        else:
            self._head = data
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._head:
            self._transport.write(self._head)
            self._give_back()

    def _give_back(self) -> None:
        if self._cycle.response_started:
            self._head, self._cycle.transport = b"", self._transport
