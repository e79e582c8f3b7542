"""The server side of a multiplexed stream."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import grpc

from pagewire.wire.rpc import RpcError
from pagewire.wire.streams.draining import Draining
from pagewire.wire.streams.outbox import Outbox

# Tokens, log probabilities and entries in one message: a few megabytes, where a message may have 64.
MAX_PER_MESSAGE = 100_000

Request = TypeVar("Request")
Output = TypeVar("Output")
In = TypeVar("In")
Out = TypeVar("Out")


class Session(ABC, Generic[Request, Output, In, Out]):
    """The requests of one client by its numbers, from one stream or from a single call.

    A subclass reads and builds messages and starts requests. It puts their outputs into the outbox; an output under the
    key None makes the session greet the client again.
    """

    def __init__(
        self,
        merge: Callable[[Sequence[Output]], Output],
        size: Callable[[Output], int],
        is_last: Callable[[Output], bool],
        draining: Draining,
    ) -> None:
        """merge, size: of outputs, see Outbox. is_last: whether an output ends its request. draining: of this
        process."""
        self.outbox: Outbox[int | None, Output] = Outbox(merge, size)
        self._size = size
        self._is_last = is_last
        # number -> ends the request; it is live until its last output is taken
        self._live: dict[int, Callable[[], None]] = {}
        self._has_sent_all = False
        self._draining = draining
        self._is_finishing = False
        self._call: asyncio.Task[Any] | None = None  # serves the stream, and sends its status

    @abstractmethod
    async def greet(self) -> Out:
        """Returns the first response, after which the client may send. Raises RpcError to refuse the stream."""

    @abstractmethod
    def greet_again(self) -> None:
        """Puts an output under the key None into the outbox."""

    @abstractmethod
    def on_message(self, message: In) -> None:
        """Calls start() and abort() for the contents of a message."""

    @abstractmethod
    def begin(self, number: int, request: Request) -> Callable[[], None]:
        """Starts a request, and returns a function that ends it early. Errors of the request go to the outbox."""

    @abstractmethod
    def build_message(self, outputs: dict[int, Output]) -> Out:
        """Returns the response with these outputs, by number."""

    def start(self, number: int, request: Request) -> None:
        """Starts a request. Raises RpcError if its number is in use."""
        if number in self._live:
            raise RpcError(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"request number {number} is in use on this stream; give each request its own number",
            )
        self._live[number] = self.begin(number, request)

    def abort(self, number: int) -> None:
        """Ends a request without a response; does nothing for a request that has ended."""
        end = self._live.pop(number, None)
        if end is not None:
            end()
            self.outbox.discard(number)
            self._close_if_done()

    def close(self) -> None:
        """Ends all live requests, when the stream has ended or is about to."""
        live, self._live = self._live, {}
        for end in live.values():
            end()

    async def finish(self) -> None:
        """Ends the stream once it has written the outputs that it holds; requests that still run end without one."""
        self._is_finishing = True
        self.close()
        self.outbox.close()
        if self._call is not None:
            await asyncio.wait({self._call})

    async def responses(self, messages: AsyncIterator[In]) -> AsyncGenerator[Out, None]:
        """Yields the responses, until the client has sent everything and received all outputs.

        Raises RpcError if the client breaks the contract.
        """
        reader: asyncio.Task[Any] = asyncio.create_task(self._read(messages))
        try:
            greeting = await self.greet()
            if self._draining.is_finishing:
                await asyncio.Event().wait()  # until the server cuts it
            self._call = asyncio.current_task()
            self._draining.on_begin.add(self.greet_again)
            self._draining.streams.add(self)
            yield greeting
            while outputs := await self.outbox.take():
                if outputs.pop(None, None) is not None:
                    yield await self.greet()
                for message in self._messages(outputs):
                    yield message
                self._close_if_done()
            # Where this side ends the stream, the client has not said that it has sent everything.
            if not self._is_finishing:
                await reader
        finally:
            self._draining.on_begin.discard(self.greet_again)
            self._draining.streams.discard(self)
            self.close()
            reader.cancel()
            # The end of the stream is handled above; when the server stops, gRPC's reader raises another error.
            await asyncio.gather(reader, return_exceptions=True)

    def _messages(self, outputs: dict[int | None, Output]) -> Iterator[Out]:
        """Yields the outputs as one message, or as several if they are large."""
        part: dict[int, Output] = {}
        size = 0
        for number, output in outputs.items():
            assert number is not None
            if self._is_last(output):
                self._live.pop(number, None)
            part[number] = output
            size += 1 + self._size(output)
            if size > MAX_PER_MESSAGE:
                yield self.build_message(part)
                part, size = {}, 0
        if part:
            yield self.build_message(part)

    async def _read(self, messages: AsyncIterator[In]) -> None:
        try:
            async for message in messages:
                if not self._is_finishing:  # later requests are the successor's
                    self.on_message(message)
        except Exception:
            # The stream ends with this error, for instance with bytes that are not a message.
            self.close()
            self.outbox.close()
            raise
        self._has_sent_all = True
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._has_sent_all and not self._live:
            self.outbox.close()
