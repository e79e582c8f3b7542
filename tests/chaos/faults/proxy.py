"""A way between two services, which can break, stop or slow down."""

from __future__ import annotations

import asyncio
from contextlib import suppress

CHUNK_BYTES = 1 << 16

# "unix:/path" or ("127.0.0.1", port)
Address = str | tuple[str, int]


class Proxy:
    """Passes bytes on between clients of `inner` and the server at `outer`."""

    def __init__(self, inner: Address, outer: Address) -> None:
        self._inner, self._outer = inner, outer
        self._passable = {"forth": asyncio.Event(), "back": asyncio.Event()}
        for event in self._passable.values():
            event.set()
        self._refuses = 0
        self._delay = 0.0
        self._connections: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        if isinstance(self._inner, str):
            self._server = await asyncio.start_unix_server(self._serve, self._inner.removeprefix("unix:"))
        else:
            self._server = await asyncio.start_server(self._serve, *self._inner)

    async def stop(self) -> None:
        self.mend()
        if self._server is not None:
            self._server.close()
        self.cut()

    # What can be wrong with it.

    def cut(self) -> None:
        """Breaks the connections that there are."""
        for writer in list(self._connections):
            writer.transport.abort()

    def refuse(self) -> None:
        """Breaks the connections that there are, and all that are made until it is mended."""
        self._refuses += 1
        self.cut()

    def block(self, direction: str) -> None:
        """Nothing passes: forth, back or both."""
        for name, event in self._passable.items():
            if direction in (name, "both"):
                event.clear()

    def slow(self, seconds: float) -> None:
        """Passes bytes late, and a few at a time."""
        self._delay = seconds

    def mend(self) -> None:
        self._refuses, self._delay = 0, 0.0
        for event in self._passable.values():
            event.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        onward: asyncio.StreamWriter | None = None
        try:
            if self._refuses:
                return
            if isinstance(self._outer, str):
                answers, onward = await asyncio.open_unix_connection(self._outer.removeprefix("unix:"))
            else:
                answers, onward = await asyncio.open_connection(*self._outer)
            self._connections.add(onward)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass(reader, onward, "forth"))
                group.create_task(self._pass(answers, writer, "back"))
        except (OSError, ExceptionGroup, asyncio.CancelledError):
            pass  # asyncio's servers complain of handlers that were cancelled
        finally:
            for end in (writer, onward):
                if end is not None:
                    self._connections.discard(end)
                    end.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: str) -> None:
        while data := await reader.read(CHUNK_BYTES):
            if self._delay:
                await asyncio.sleep(self._delay)
            await self._passable[direction].wait()
            writer.write(data)
            await writer.drain()
        with suppress(OSError, RuntimeError):
            await writer.drain()
        # an end that closes one direction expects nothing in the other: HTTP and gRPC close both
        raise ConnectionResetError
