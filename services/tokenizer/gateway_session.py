"""One gateway's multiplexed stream: its requests in, their news out."""

from collections.abc import AsyncIterator

from pagewire.rpc import RpcError
from protos.pagewire.v1 import inference_pb2
from services.tokenizer.client_requests import ClientRequests
from services.tokenizer.delivery import num_unread
from services.tokenizer.text_generator import TextGenerator

# Tokens and log probabilities in one message: a few megabytes, where a message may have 64.
MAX_PER_MESSAGE = 100_000


class GatewaySession:
    """Connect, for one gateway."""

    def __init__(self, generator: TextGenerator) -> None:
        self._requests = ClientRequests(generator)

    async def read(self, messages: AsyncIterator[inference_pb2.ConnectRequest]) -> None:
        """Takes in what the gateway sends until it says no more; responses() then ends with the last request.

        Raises RpcError if it broke the contract.
        """
        try:
            async for message in messages:
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
            message, size = inference_pb2.ConnectResponse(), 0
            for number, one in ((number, news.read()) for number, news in unread.items()):
                # The constructor's copy is the only one: appending would make a second.
                if isinstance(one, RpcError):
                    message.responses.add(number=number, error=one.to_message())
                else:
                    message.responses.add(number=number, response=one)
                size += 1 + num_unread(one)
                if size > MAX_PER_MESSAGE:
                    yield message
                    message, size = inference_pb2.ConnectResponse(), 0
            if message.responses:
                yield message

    def close(self) -> None:
        """The gateway is gone: ends all its requests."""
        self._requests.abort_all()
