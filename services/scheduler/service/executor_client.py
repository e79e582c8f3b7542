"""The scheduler's side of the stream to one executor."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import grpc

from pagewire.services.scheduler.service import convert
from pagewire.services.scheduler.values.executor_info import ExecutorInfo, Weights
from pagewire.services.scheduler.values.loss import Loss
from pagewire.services.scheduler.values.step import InvalidResult, ScheduledStep, StepClock, StepResult
from pagewire.telemetry.trace import Trace
from pagewire.v1 import executor_pb2, executor_pb2_grpc
from pagewire.v1.common_pb2 import Grammar
from pagewire.wire.rpc import RpcError
from pagewire.wire.status.executor_failures import ExecutorFailure
from pagewire.wire.streams import Link, Pings
from pagewire.wire.streams.stream_end import StreamEnd

logger = logging.getLogger(__name__)

_LOSSES: dict[str, Loss] = {
    ExecutorFailure.STEP_FAILED: Loss.STEP,
    ExecutorFailure.DEVICE_FAILED: Loss.DEVICE,
    ExecutorFailure.NO_PROGRESS: Loss.HANG,
    ExecutorFailure.MODEL_BROKEN: Loss.MODEL,
    ExecutorFailure.SUPERSEDED: Loss.LEFT_TO_OTHERS,
}
_NAME = executor_pb2.DESCRIPTOR.services_by_name["ExecutorService"].full_name


class ExecutorListener(Protocol):
    """Who wants to know. Calls come one at a time."""

    def weights_wanted(self, present: Weights) -> Weights:
        """An executor has these weights; returns those that it is to have before it is used."""

    def on_described(self, incarnation: int) -> None:
        """This executor is there. Raises RpcError FAILED_PRECONDITION if it is not to be used."""

    def on_executor(self, info: ExecutorInfo) -> None:
        """An executor is there, with empty rows and an empty KV cache; steps are counted from 1.

        Raises RpcError FAILED_PRECONDITION if it cannot be used: it is left alone, and asked again later.
        """

    def on_result(self, result: StepResult, clock: StepClock) -> None:
        """A step is done. InvalidResult ends the stream; a new one follows."""

    def on_leaving(self, is_leaving: bool) -> None:
        """Whether the executor, which still works, is about to end."""

    def on_executor_lost(self, loss: Loss, reason: str) -> None:
        """The executor is gone, with everything that was in flight; on_executor may follow."""


class ExecutorClient:
    """Finds the executor, sends it steps and reports their results; starts over for as long as `run()` runs.

    A new stream empties the executor's rows and KV cache, and behind the address may be another process with another
    capacity: each begins with Describe. The first message carries this scheduler's term, and the executor is ours once
    it has answered that: one that a later scheduler has refuses us, again and again until that one leaves it.
    """

    def __init__(
        self, channel: grpc.aio.Channel, address: str, term: int, listener: ExecutorListener, hang_timeout: float = 0.0
    ) -> None:
        """address: for the log. hang_timeout: seconds without a sign of life after which the executor is lost; 0 =
        never."""
        self._stub = executor_pb2_grpc.ExecutorServiceStub(channel)
        self._address = address
        self._term = term
        self._listener = listener
        self._description: executor_pb2.DescribeResponse | None = None  # of a stream that was opened
        self._is_open = False
        self.was_refused = False  # by an executor that a later scheduler has, or that cannot be used
        self._pings = Pings(channel, _NAME, hang_timeout)
        self._link: Link[executor_pb2.StepRequest, executor_pb2.StepResult] = Link(
            "executor", self._stub.Execute, self, self._pings, self._on_ping
        )

    @property
    def incarnation(self) -> int | None:
        """Of the executor that a stream is open to, or about to be."""
        return self._description.incarnation if self._description is not None else None

    async def run(self) -> None:
        await self._link.run()

    async def send(self, step: ScheduledStep, traces: Sequence[Trace]) -> None:
        """Sends in call order; traces are parallel to step.new_requests."""
        await self._link.send(convert.from_step(step, traces))

    async def compile(self, grammar: Grammar) -> None:
        """Raises grpc.aio.AioRpcError; INVALID_ARGUMENT says what is wrong with it."""
        await self._stub.CompileGrammar(executor_pb2.CompileGrammarRequest(grammar=grammar))

    async def load(self, weights: Weights) -> Weights:
        """Has it load weights beside its own, and returns what these turned out to be. Raises grpc.aio.AioRpcError."""
        request = executor_pb2.LoadWeightsRequest(weights=convert.from_weights(weights))
        return convert.to_weights((await self._stub.LoadWeights(request)).weights)

    async def drop(self) -> None:
        """Has it forget these. Raises grpc.aio.AioRpcError."""
        await self._stub.DropWeights(executor_pb2.DropWeightsRequest())

    def start_over(self, reason: str) -> None:
        """Breaks the stream; a new one follows."""
        self._link.start_over(reason)

    async def on_connect(self, send: Callable[[executor_pb2.StepRequest], Awaitable[None]]) -> None:
        # Answers once the weights are loaded, which may take minutes; keep-alive notices if the process dies meanwhile.
        description = await self._stub.Describe(executor_pb2.DescribeRequest(), wait_for_ready=True)
        self._listener.on_described(description.incarnation)
        self._description = description
        present = convert.to_weights(description.weights)
        wanted = self._listener.weights_wanted(present)
        if wanted != present:
            await self._install(wanted)
            description.weights.CopyFrom(convert.from_weights(wanted))
        await send(executor_pb2.StepRequest(term=self._term))

    async def _install(self, weights: Weights) -> None:
        """Raises RpcError if that cannot be done; it is tried again with the next stream."""
        try:
            await self.load(weights)
            request = executor_pb2.InstallWeightsRequest(weights=convert.from_weights(weights), term=self._term)
            await self._stub.InstallWeights(request)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise
            raise RpcError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"it cannot get weights {weights.version} of {weights.model}, which are in force: {error.details()}",
            ) from error

    def on_message(self, message: executor_pb2.StepResult) -> None:
        if self._is_open:
            self._listener.on_result(convert.to_step_result(message), convert.to_step_clock(message))
            return
        if message.step_id != 0 or self._description is None:
            raise InvalidResult(f"the executor answered step {message.step_id} on a stream that is not open")
        self._listener.on_executor(convert.to_executor_info(self._description))
        self._is_open, self.was_refused = True, False
        self._pings.is_serving = True  # whatever the one before it said last

    def _on_ping(self) -> None:
        if self._is_open:
            self._listener.on_leaving(not self._pings.is_serving)

    def on_disconnect(self, end: StreamEnd) -> None:
        self._description = None
        was_open, self._is_open = self._is_open, False
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            return  # the service stops: it leaves the executor, not the other way round
        if was_open:
            self._listener.on_executor_lost(_loss_of(end), end.text)
        elif end.code is grpc.StatusCode.FAILED_PRECONDITION and not self.was_refused:
            self.was_refused = True
            logger.warning("the executor at %s cannot be used (%s); trying again", self._address, end.text)


def _loss_of(end: StreamEnd) -> Loss:
    if end.starts_over:
        return Loss.WEIGHTS  # the only reason to start over
    if end.code is grpc.StatusCode.OK:
        return Loss.LEFT_TO_OTHERS
    return _LOSSES.get(end.reason, Loss.SILENT)
