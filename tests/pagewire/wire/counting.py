"""Both ends of a multiplexed stream without a model: a request is a number of tokens, counted up from a start."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from pagewire.v1 import common_pb2, inference_link_pb2, inference_link_pb2_grpc
from pagewire.v1.inference_link_pb2 import ConnectRequest, ConnectResponse, GenerateSubmission
from pagewire.v1.inference_pb2 import GenerateRequest, GenerateResponse
from pagewire.wire import rpc
from pagewire.wire.discovery import Discovery, Static
from pagewire.wire.rpc import RpcError
from pagewire.wire.secure_rpc import NO_TLS
from pagewire.wire.streams import Draining, LinkedRequest, OpenCall, Pings, ResubmittingLink, Session

SERVICE = inference_link_pb2.DESCRIPTOR.services_by_name["InferenceLinkService"].full_name


@dataclass
class Tokens:
    token_ids: list[int]
    is_last: bool = False

    @staticmethod
    def merged(outputs: "Sequence[Tokens]") -> "Tokens":
        return Tokens([token_id for tokens in outputs for token_id in tokens.token_ids], outputs[-1].is_last)


class CountingSession(Session[GenerateSubmission, Tokens, ConnectRequest, ConnectResponse]):
    """Answers {token_ids: [start, count]} with start, start + 1, ..., one token per step()."""

    def __init__(self, may_greet: asyncio.Event, draining: Draining | None = None) -> None:
        super().__init__(
            Tokens.merged,
            lambda tokens: len(tokens.token_ids),
            lambda tokens: tokens.is_last,
            draining or Draining(),
        )
        self._may_greet = may_greet
        self.left: dict[int, list[int]] = {}  # number -> tokens to come
        self.begun: list[GenerateSubmission] = []
        self.num_greetings = 0

    async def greet(self) -> ConnectResponse:
        await self._may_greet.wait()
        self.num_greetings += 1
        return ConnectResponse(draining=self._draining.has_begun)

    def greet_again(self) -> None:
        self.outbox.put(None, Tokens([]))

    def on_message(self, message: ConnectRequest) -> None:
        assert self.num_greetings, "something was sent before the greeting"
        for submission in message.requests:
            self.start(submission.number, submission)
        for number in message.abort_numbers:
            self.abort(number)

    def begin(self, number: int, submission: GenerateSubmission) -> Callable[[], None]:
        start, count = submission.request.token_ids.ids
        tokens = list(range(start, start + count))
        resumed = list(submission.resume_token_ids)
        assert tokens[: len(resumed)] == resumed, "resumed with tokens that were never sent"
        self.begun.append(submission)
        self.left[number] = tokens[len(resumed) :]

        def end() -> None:
            self.left.pop(number, None)

        return end

    def build_message(self, outputs: dict[int, Tokens]) -> ConnectResponse:
        message = ConnectResponse()
        for number, tokens in outputs.items():
            reason = common_pb2.FINISH_REASON_LENGTH if tokens.is_last else common_pb2.FINISH_REASON_UNSPECIFIED
            response = GenerateResponse(token_ids=tokens.token_ids, finish_reason=reason)
            message.responses.add(number=number, response=response)
        return message

    def step(self) -> None:
        for number, tokens in list(self.left.items()):
            new, self.left[number] = tokens[:1], tokens[1:]
            if len(tokens) <= 1:
                del self.left[number]
            self.outbox.put(number, Tokens(new, is_last=len(tokens) <= 1))


@dataclass
class CountingService(inference_link_pb2_grpc.InferenceLinkServiceServicer):
    """One CountingSession per stream. The streams break, one after the other, at these moments of theirs: 0 is before
    the greeting, and every message that comes or goes is one or two more. Later streams last."""

    breaks: list[int] = field(default_factory=list)
    running: asyncio.Event = field(default_factory=asyncio.Event)  # cleared: no tokens
    may_greet: asyncio.Event = field(default_factory=asyncio.Event)  # cleared: no stream comes up
    draining: Draining = field(default_factory=Draining)
    sessions: list[CountingSession] = field(default_factory=list)
    errors: list[RpcError] = field(default_factory=list)  # of clients that broke the contract

    def __post_init__(self) -> None:
        self.running.set()
        self.may_greet.set()

    @property
    def num_live(self) -> int:
        return sum(len(session.left) for session in self.sessions)

    async def Connect(self, request_iterator, context) -> AsyncIterator[ConnectResponse]:
        moments = self.breaks.pop(0) if self.breaks else None

        def pass_moment() -> None:
            nonlocal moments
            if moments is not None:
                if moments == 0:
                    raise RpcError(grpc.StatusCode.UNAVAILABLE, "broken on purpose")
                moments -= 1

        async def messages() -> AsyncIterator[ConnectRequest]:
            async for message in request_iterator:
                pass_moment()
                yield message

        session = CountingSession(self.may_greet, self.draining)
        self.sessions.append(session)
        stepper = asyncio.create_task(self._step(session))
        try:
            pass_moment()
            async with aclosing(session.responses(messages())) as responses:
                async for response in responses:
                    pass_moment()
                    yield response
                    pass_moment()
        except RpcError as error:
            if error.code is not grpc.StatusCode.UNAVAILABLE:
                self.errors.append(error)
            raise
        finally:
            await rpc.cancel([stepper])

    async def _step(self, session: CountingSession) -> None:
        while True:
            await asyncio.sleep(0.001)
            await self.running.wait()
            session.step()


@asynccontextmanager
async def serving(
    directory: Path, service: CountingService, name: str = "s", shutdown_timeout: float = 30.0
) -> AsyncIterator[rpc.Server]:
    """Serves at a socket of this name."""
    server = rpc.Server([f"unix:{directory}/{name}.sock"], shutdown_timeout)
    server.add(service, inference_link_pb2_grpc.add_InferenceLinkServiceServicer_to_server, SERVICE)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


class CountedRequest(LinkedRequest):
    def __init__(self, start: int, count: int, abort_after: int | None = None) -> None:
        """abort_after: tokens after which the link's owner wants no more."""
        super().__init__()
        self.start, self.count, self.abort_after = start, count, abort_after
        self.received: list[int] = []
        self.error: RpcError | None = None
        self.has_ended = asyncio.Event()

    @property
    def expected(self) -> list[int]:
        return list(range(self.start, self.start + self.count))

    def to_submit(self) -> GenerateSubmission:
        request = GenerateRequest(token_ids={"ids": [self.start, self.count]})
        return GenerateSubmission(
            number=self.number, request=request, resume_token_ids=self.received, resubmitted=self.was_sent
        )

    def fail(self, error: RpcError) -> None:
        self.error = error
        self.has_ended.set()


class CountingLink(ResubmittingLink[CountedRequest, ConnectRequest, ConnectResponse]):
    def __init__(self, discovery: Discovery, recovery_timeout: float) -> None:
        super().__init__("counting service", discovery, NO_TLS.listed_channel, recovery_timeout)
        self.num_messages = 0

    def open(self, channel: grpc.aio.Channel) -> tuple[OpenCall[ConnectRequest, ConnectResponse], Pings | None]:
        return inference_link_pb2_grpc.InferenceLinkServiceStub(channel).Connect, None

    def build_message(self, submits: list[GenerateSubmission], aborts: list[int]) -> ConnectRequest:
        self.num_messages += 1
        return ConnectRequest(requests=submits, abort_numbers=aborts)

    def on_response(self, message: ConnectResponse) -> None:
        for numbered in message.responses:
            request = self.answered(numbered.number)
            if request is None:
                continue
            assert not request.has_ended.is_set(), "output after the end"
            request.received += numbered.response.token_ids
            if numbered.response.finish_reason:
                self.finish(request)
                request.has_ended.set()
            elif request.abort_after is not None and len(request.received) >= request.abort_after:
                self.abort(request)
                request.has_ended.set()


@asynccontextmanager
async def linked(
    directory: Path, recovery_timeout: float = 20.0, discovery: Discovery | None = None
) -> AsyncIterator[CountingLink]:
    """Links to the services that `discovery` finds; without one, to the service of `serving`."""
    link = CountingLink(discovery or Static([f"unix:{directory}/s.sock"]), recovery_timeout)
    task = asyncio.create_task(link.run())
    try:
        yield link
        assert not task.done()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
