"""The server side of a multiplexed stream."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import grpc

from pagewire.wire.rpc import RpcError
from pagewire.wire.streams.outbox import Outbox

# Tokens, log probabilities and entries in one message: a few megabytes, where a message may have 64.
MAX_PER_MESSAGE = 100_000

Request = TypeVar("Request")
Output = TypeVar("Output")
In = TypeVar("In")
Out = TypeVar("Out")


class Session(ABC, Generic[Request, Output, In, Out]):
    """The requests of one client, by the numbers that it gave them: from one stream, or those of a call of its own.

    A subclass reads and builds the messages and starts requests, whose outputs it puts into the outbox; whatever it
    puts there under None has the session greet the client again.
    """

    def __init__(
        self,
        merge: Callable[[Sequence[Output]], Output],
        size: Callable[[Output], int],
        is_last: Callable[[Output], bool],
    ) -> None:
        """merge, size: of outputs, see Outbox. is_last: whether nothing follows an output, as the request has ended."""
        self.outbox: Outbox[int | None, Output] = Outbox(merge, size)
        self._size = size
        self._is_last = is_last
        self._live: dict[int, Callable[[], None]] = {}  # what ends each; a request is live until its end was taken
        self._has_said_all = False

    @abstractmethod
    async def greet(self) -> Out:
        """The first response, which tells the client that it may send. Raises RpcError to refuse the stream."""

    @abstractmethod
    def on_message(self, message: In) -> None:
        """Calls start() and abort() with what the message holds."""

    @abstractmethod
    def begin(self, number: int, request: Request) -> Callable[[], None]:
        """Starts a request; returns what ends it early. If it cannot be served, its error goes to the outbox."""

    @abstractmethod
    def build_message(self, outputs: dict[int, Output]) -> Out:
        """The response that tells of the outputs, by number."""

    def start(self, number: int, request: Request) -> None:
        """Raises RpcError if the number is in use."""
        if number in self._live:
            raise RpcError(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"request number {number} is in use on this stream; each request needs one of its own",
            )
        self._live[number] = self.begin(number, request)

    def abort(self, number: int) -> None:
        """Ends a request, without a response; numbers of requests that ended are ignored."""
        end = self._live.pop(number, None)
        if end is not None:
            end()
            self.outbox.discard(number)
            self._close_if_done()

    def close(self) -> None:
        """The client is gone, or all is said: ends what is live."""
        live, self._live = self._live, {}
        for end in live.values():
            end()

    async def responses(self, messages: AsyncIterator[In]) -> AsyncGenerator[Out, None]:
        """What is to be sent, until the client says no more and was told everything, or breaks the contract.

        Raises RpcError in that case.
        """
        reader: asyncio.Task[Any] = asyncio.create_task(self._read(messages))
        try:
            yield await self.greet()
            async for outputs in self.outbox:
                if outputs.pop(None, None) is not None:
                    yield await self.greet()
                for message in self._messages(outputs):
                    yield message
                self._close_if_done()
            await reader
        finally:
            self.close()
            reader.cancel()
            # How the stream ended is said above; of a server that stops, gRPC's reader raises an error of its own.
            await asyncio.gather(reader, return_exceptions=True)

    def _messages(self, outputs: dict[int | None, Output]) -> Iterator[Out]:
        """One, or several if there is very much to tell."""
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
                self.on_message(message)
        except Exception:
            # The stream ends with whatever it was, for instance with bytes that are no message.
            self.close()
            self.outbox.close()
            raise
        self._has_said_all = True
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._has_said_all and not self._live:
            self.outbox.close()
