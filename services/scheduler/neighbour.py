"""One neighbour's multiplexed stream: all its requests in, their news out."""

from collections.abc import AsyncIterator

import grpc

from pagewire.rpc import RpcError
from pagewire.services.scheduler import convert
from pagewire.services.scheduler.engine import Engine, LiveRequest
from pagewire.services.scheduler.news import News, new_outbox
from pagewire.services.scheduler.request import FinishReason
from pagewire.v1 import scheduler_pb2


class Neighbour:
    """The requests of one stream, by the numbers that the neighbour gave them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._live: dict[int, LiveRequest] = {}
        self._outbox = new_outbox()
        self._has_said_all = False
        self._is_model_new = False
        engine.on_model_change.add(self._greet_again)

    async def read(self, messages: AsyncIterator[scheduler_pb2.SchedulerServiceConnectRequest]) -> None:
        """Takes in what the neighbour sends until it says no more.

        Raises:
            RpcError: it broke the contract.
        """
        try:
            async for message in messages:
                for request in message.requests:
                    self._submit(request)
                for number in message.abort_request_ids:
                    self._abort(number)
        except Exception:
            # The stream ends with whatever it was, for instance with bytes that are no message.
            self._outbox.close()
            raise
        self._has_said_all = True
        if not self._live:
            self._outbox.close()

    async def responses(self) -> AsyncIterator[scheduler_pb2.SchedulerServiceConnectResponse]:
        """What there is to tell, everything there is each time; ends after the last request if no more can come."""
        async for taken in self._outbox:
            news_by_number = {number: news for number, news in taken.items() if number is not None}
            if self._is_model_new and self._engine.info is not None:
                self._is_model_new = False
                yield scheduler_pb2.SchedulerServiceConnectResponse(hello=convert.from_info(self._engine.info))
            for number, news in news_by_number.items():
                if news.finish_reason is not None:
                    self._live.pop(number, None)
            for part in convert.split_news(news_by_number):
                yield convert.from_all_news(part)
            if self._has_said_all and not self._live:
                return

    def close(self) -> None:
        """Nobody is there any more: ends all its requests."""
        self._engine.on_model_change.discard(self._greet_again)
        for live in self._live.values():
            self._engine.abort(live)
        self._live.clear()

    def _submit(self, request: scheduler_pb2.TokenRequest) -> None:
        number = request.request_id
        if number in self._live:
            raise RpcError(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"request_id {number} is in use on this stream; each request needs one of its own",
            )
        try:
            self._live[number] = self._engine.submit(request, self._outbox, number)
        except RpcError as error:
            self._outbox.put(number, News([], len(request.prompt_token_ids), 0, 0, FinishReason.ERROR, error=error))

    def _abort(self, number: int) -> None:
        live = self._live.pop(number, None)
        if live is not None:
            self._engine.abort(live)
            self._outbox.discard(number)

    def _greet_again(self) -> None:
        self._is_model_new = True
        # Wakes responses() even if there is no news.
        self._outbox.put(None, News([], 0, 0, 0))
