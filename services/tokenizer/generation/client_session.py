"""The requests of one client: of a gateway's multiplexed stream, or of one call of the public API."""

from collections.abc import Callable

from pagewire.services.tokenizer import stats
from pagewire.services.tokenizer.errors import invalid
from pagewire.services.tokenizer.generation.text_generator import TextGenerator
from pagewire.services.tokenizer.output.text_output import (
    MAX_UNREAD,
    TextDelta,
    TextOutput,
    is_last,
    merged,
    size_of,
    unread_error,
)
from pagewire.services.tokenizer.received import Received
from pagewire.v1.inference_link_pb2 import ConnectRequest, ConnectResponse
from pagewire.v1.inference_pb2 import GenerateResponse
from pagewire.wire.rpc import RpcError
from pagewire.wire.streams import Session


class ClientSession(Session[Received, TextOutput, ConnectRequest, ConnectResponse]):
    def __init__(self, generator: TextGenerator) -> None:
        super().__init__(merged, size_of, is_last, generator.draining)
        self._generator = generator

    async def greet(self) -> ConnectResponse:
        return ConnectResponse(draining=self._generator.draining.has_begun, model=self._generator.models.names[0])

    def greet_again(self) -> None:
        self.outbox.put(None, GenerateResponse())

    def on_message(self, message: ConnectRequest) -> None:
        for submission in message.requests:
            self.start(submission.number, Received.of_link(submission))
        for number in message.abort_numbers:
            self.abort(number)

    def begin(self, number: int, received: Received) -> Callable[[], None]:
        def deliver(output: TextOutput) -> None:
            num_unread = self.outbox.put(number, output)
            if num_unread > MAX_UNREAD and not is_last(output):
                stats.UNREAD_CANCELLATIONS.inc()
                self.abort(number)
                self.outbox.put(number, unread_error())

        request = received.request
        if request.n > 1 or request.best_of or request.HasField("beam_search"):
            deliver(invalid("n, best_of and beam_search are for Generate; here each output is a separate request"))
            return lambda: None
        return self._generator.start(received, deliver).abort

    def build_message(self, outputs: dict[int, TextOutput]) -> ConnectResponse:
        # Columns are collected in lists: a message takes a whole list faster than its elements.
        numbers: list[int] = []
        texts: list[str] = []
        num_tokens: list[int] = []
        token_ids: list[int] = []
        others: list[tuple[int, RpcError | GenerateResponse]] = []
        for number, output in outputs.items():
            if isinstance(output, TextDelta):
                numbers.append(number)
                texts.append(output.text)
                num_tokens.append(len(output.token_ids))
                token_ids += output.token_ids
            else:
                others.append((number, output))
        message = ConnectResponse(numbers=numbers, texts=texts, num_tokens=num_tokens, token_ids=token_ids)
        for number, other in others:
            numbered = message.responses.add(number=number)
            if isinstance(other, RpcError):
                numbered.error.CopyFrom(other.to_message())
            else:
                numbered.response.CopyFrom(other)
        return message
