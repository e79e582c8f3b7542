"""The requests of one client, from their start to what the client has not read yet."""

import asyncio
import logging

import grpc

from pagewire.rpc import RpcError
from pagewire.services.tokenizer import stats
from pagewire.services.tokenizer.delivery import MAX_UNREAD, Delta, News, Unread, new_response_box, unread_error
from pagewire.services.tokenizer.text_generator import LiveGeneration, TextGenerator
from pagewire.v1 import inference_pb2

logger = logging.getLogger(__name__)


class ClientRequests:
    """By number. A request is a task while its prompt is encoded and a LiveGeneration afterwards."""

    def __init__(self, generator: TextGenerator) -> None:
        self._generator = generator
        self.box = new_response_box()
        self._starting: dict[int, asyncio.Task[None]] = {}
        self._live: dict[int, LiveGeneration] = {}
        self._closing = False

    def close_when_done(self) -> None:
        """No more requests come: the box closes with the news of the last one."""
        self._closing = True
        self._close_if_done()

    def start(self, number: int, request: inference_pb2.GenerateRequest, traceparent: str = "") -> None:
        """Its responses, or its error, appear in the box. Raises RpcError if the number is in use."""
        if number in self._starting or number in self._live:
            raise RpcError(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"number {number} is in use on this stream; each request needs one of its own",
            )
        self._starting[number] = asyncio.create_task(self._start(number, request, traceparent))

    def abort(self, number: int) -> None:
        """No response follows; unknown numbers are ignored."""
        if (task := self._starting.pop(number, None)) is not None:
            task.cancel()
        if (live := self._live.pop(number, None)) is not None:
            live.abort()
        self.box.discard(number)
        self._close_if_done()

    def abort_all(self) -> None:
        """The client is gone."""
        for number in [*self._starting, *self._live]:
            self.abort(number)

    async def _start(self, number: int, request: inference_pb2.GenerateRequest, traceparent: str) -> None:
        def deliver(news: News) -> None:
            self._put(number, news)

        try:
            live = await self._generator.start(request, deliver, traceparent)
        except RpcError as error:
            self._put(number, error)
        except Exception as error:
            logger.exception("a request could not be started", extra={"request_id": request.request_id})
            self._put(number, RpcError(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"))
        else:
            # Unless it ended already, from its resumed tokens alone.
            if not live.finished:
                self._live[number] = live
        del self._starting[number]
        self._close_if_done()

    def _put(self, number: int, news: News) -> None:
        unread = self.box.put(number, Unread(news))
        if not isinstance(news, Delta) and (isinstance(news, RpcError) or news.finish_reason):
            self._live.pop(number, None)
            self._close_if_done()
        elif unread.size > MAX_UNREAD:
            stats.UNREAD_CANCELLATIONS.inc()
            self.abort(number)
            self.box.put(number, Unread(unread_error()))

    def _close_if_done(self) -> None:
        if self._closing and not self._starting and not self._live:
            self.box.close()
