"""One client's requests: those of a gateway's multiplexed stream, or the one of a call of its own."""

import asyncio
import logging
from collections.abc import Callable, Iterator

import grpc

from pagewire.rpc import RpcError
from pagewire.services.tokenizer import stats
from pagewire.services.tokenizer.text_generator import LiveGeneration, TextGenerator
from pagewire.services.tokenizer.text_output import MAX_UNREAD, TextDelta, TextOutput, UnreadOutput, unread_error
from pagewire.services.tokenizer.text_stream import Deliver
from pagewire.streams import Session
from pagewire.v1.inference_pb2 import ConnectRequest, ConnectResponse, GenerateRequest, NumberedResponse

logger = logging.getLogger(__name__)

# Tokens and log probabilities in one message: a few megabytes, where a message may have 64.
MAX_PER_MESSAGE = 100_000


class ClientSession(Session[GenerateRequest, UnreadOutput, ConnectRequest, ConnectResponse]):
    def __init__(self, generator: TextGenerator) -> None:
        super().__init__()
        self._generator = generator

    async def greet(self) -> ConnectResponse:
        return ConnectResponse()

    def on_message(self, message: ConnectRequest) -> None:
        for numbered in message.requests:
            self.start(numbered.number, numbered.request)
        for number in message.abort_numbers:
            self.abort(number)

    def begin(self, number: int, request: GenerateRequest) -> Callable[[], None]:
        def deliver(output: TextOutput) -> None:
            unread = self.outbox.put(number, UnreadOutput(output))
            if unread.size > MAX_UNREAD and not unread.is_last:
                stats.UNREAD_CANCELLATIONS.inc()
                self.abort(number)
                self.outbox.put(number, UnreadOutput(unread_error()))

        return _ClientRequest(self._generator, request, deliver).abort

    def build_messages(self, outputs: dict[int | None, UnreadOutput]) -> Iterator[ConnectResponse]:
        message = _Message()
        for number, unread in outputs.items():
            assert number is not None
            message.add(number, unread)
            if message.size > MAX_PER_MESSAGE:
                yield message.build()
                message = _Message()
        if message.size:
            yield message.build()


class _ClientRequest:
    """A task while its prompt is encoded, and a LiveGeneration afterwards."""

    def __init__(self, generator: TextGenerator, request: GenerateRequest, deliver: Deliver) -> None:
        self._live: LiveGeneration | None = None
        self._starting = asyncio.create_task(self._start(generator, request, deliver))

    async def _start(self, generator: TextGenerator, request: GenerateRequest, deliver: Deliver) -> None:
        try:
            self._live = await generator.start(request, deliver)
        except RpcError as error:
            deliver(error)
        except Exception as error:
            logger.exception("a request could not be started", extra={"request_id": request.request_id})
            deliver(RpcError(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"))

    def abort(self) -> None:
        if self._live is not None:
            self._live.abort()
        else:
            self._starting.cancel()


class _Message:
    """A ConnectResponse in the making. The columns are lists until the end, which a message takes in at once."""

    def __init__(self) -> None:
        self.size = 0  # entries, tokens and log probabilities
        self._responses: list[NumberedResponse] = []
        self._numbers: list[int] = []
        self._texts: list[str] = []
        self._num_tokens: list[int] = []
        self._token_ids: list[int] = []

    def add(self, number: int, unread: UnreadOutput) -> None:
        self.size += 1 + unread.size
        output = unread.read()
        if isinstance(output, TextDelta):
            self._numbers.append(number)
            self._texts.append(output.text)
            self._num_tokens.append(len(output.token_ids))
            self._token_ids += output.token_ids
        elif isinstance(output, RpcError):
            self._responses.append(NumberedResponse(number=number, error=output.to_message()))
        else:
            self._responses.append(NumberedResponse(number=number, response=output))

    def build(self) -> ConnectResponse:
        return ConnectResponse(
            responses=self._responses,
            numbers=self._numbers,
            texts=self._texts,
            num_tokens=self._num_tokens,
            token_ids=self._token_ids,
        )
