"""One gateway's multiplexed stream: its requests in, their news out."""

from collections.abc import AsyncIterator

from pagewire.rpc import RpcError
from pagewire.services.tokenizer.client_requests import ClientRequests
from pagewire.services.tokenizer.delivery import Delta, Unread
from pagewire.services.tokenizer.text_generator import TextGenerator
from pagewire.v1 import inference_pb2

# Tokens and log probabilities in one message: a few megabytes, where a message may have 64.
MAX_PER_MESSAGE = 100_000


class GatewaySession:
    """Connect, for one gateway."""

    def __init__(self, generator: TextGenerator) -> None:
        self._requests = ClientRequests(generator)
        self._takes_columns = False

    async def read(self, messages: AsyncIterator[inference_pb2.ConnectRequest]) -> None:
        """Takes in what the gateway sends until it says no more; responses() then ends with the last request.

        Raises RpcError if it broke the contract.
        """
        try:
            async for message in messages:
                self._takes_columns |= message.takes_columns
                for numbered in message.requests:
                    self._requests.start(numbered.number, numbered.request)
                for number in message.abort_numbers:
                    self._requests.abort(number)
        except Exception:
            # The stream ends with whatever it was, for instance with bytes that are no message.
            self._requests.box.close()
            raise
        self._requests.close_when_done()

    async def responses(self) -> AsyncIterator[inference_pb2.ConnectResponse]:
        """What there is to tell, everything at once each time (in several messages if it is very much)."""
        async for unread in self._requests.box:
            message = _Message(self._takes_columns)
            for number, news in unread.items():
                message.add(number, news)
                if message.size > MAX_PER_MESSAGE:
                    yield message.build()
                    message = _Message(self._takes_columns)
            if message.size:
                yield message.build()

    def close(self) -> None:
        """The gateway is gone: ends all its requests."""
        self._requests.abort_all()


class _Message:
    """A ConnectResponse in the making. The columns are lists until the end, which a message takes in at once."""

    def __init__(self, has_columns: bool) -> None:
        self._has_columns = has_columns
        self.size = 0  # entries, tokens and log probabilities
        self._responses: list[inference_pb2.NumberedResponse] = []
        self._numbers: list[int] = []
        self._texts: list[str] = []
        self._num_tokens: list[int] = []
        self._token_ids: list[int] = []

    def add(self, number: int, unread: Unread) -> None:
        self.size += 1 + unread.size
        news = unread.read()
        if isinstance(news, Delta) and not self._has_columns:
            news = news.response
        if isinstance(news, Delta):
            self._numbers.append(number)
            self._texts.append(news.text)
            self._num_tokens.append(len(news.token_ids))
            self._token_ids += news.token_ids
        elif isinstance(news, RpcError):
            self._responses.append(inference_pb2.NumberedResponse(number=number, error=news.to_message()))
        else:
            self._responses.append(inference_pb2.NumberedResponse(number=number, response=news))

    def build(self) -> inference_pb2.ConnectResponse:
        return inference_pb2.ConnectResponse(
            responses=self._responses,
            numbers=self._numbers,
            texts=self._texts,
            num_tokens=self._num_tokens,
            token_ids=self._token_ids,
        )
