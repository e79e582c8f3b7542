"""The scheduler's side of the stream to one executor."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import grpc

from pagewire.services.scheduler.service import convert
from pagewire.services.scheduler.values.executor_info import ExecutorInfo, Weights
from pagewire.services.scheduler.values.executor_loss import Loss
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
    """Receives the events of one executor, one at a time."""

    async def slept(self, description: executor_pb2.DescribeResponse) -> bool:
        """Returns True after a sleep, when the executor is to be described anew; False if it may be used now."""

    def on_described(self, incarnation: int, present: Weights) -> Weights:
        """Returns the weights that an executor with `present` must have before it is used.

        Raises RpcError FAILED_PRECONDITION if this executor must not be used.
        """

    def on_executor(self, info: ExecutorInfo) -> None:
        """Takes in an executor with empty rows and an empty KV cache; steps are counted from 1.

        Raises RpcError FAILED_PRECONDITION if it cannot be used; a later attempt follows.
        """

    def on_result(self, result: StepResult, clock: StepClock) -> None:
        """Takes in the result of a step. InvalidResult ends the stream; a new one follows."""

    def on_leaving(self, is_leaving: bool) -> None:
        """Takes in whether the executor, which still serves, is about to end."""

    def on_executor_lost(self, loss: Loss, reason: str) -> None:
        """Takes in that the executor is lost with all steps in flight; on_executor may follow."""


class ExecutorClient:
    """Connects to the executor, sends it steps and reports their results; reconnects while `run()` runs.

    Each stream begins with Describe, because a new stream empties the executor's rows and KV cache, and another process
    with another capacity may be behind the address. The first message carries this scheduler's term, and the executor
    is attached once it has answered it. An executor that a later scheduler uses refuses until that scheduler leaves.
    """

    def __init__(
        self, channel: grpc.aio.Channel, address: str, term: int, listener: ExecutorListener, hang_timeout: float = 0.0
    ) -> None:
        """address: shown in the log. hang_timeout: seconds without an answered ping after which the executor is lost; 0
        = never."""
        self._stub = executor_pb2_grpc.ExecutorServiceStub(channel)
        self._address = address
        self.term = term
        self._listener = listener
        self._description: executor_pb2.DescribeResponse | None = None  # that of the executor of the present stream
        self._is_open = False
        self.was_refused = False  # the executor has a later scheduler, or cannot be used
        self._pings = Pings(channel, _NAME, hang_timeout)
        self._link: Link[executor_pb2.StepRequest, executor_pb2.StepResult] = Link(
            "executor", self._stub.Execute, self, self._pings, self._on_ping
        )

    @property
    def incarnation(self) -> int | None:
        """The incarnation of the executor with a stream that is open or being opened; None without one."""
        return self._description.incarnation if self._description is not None else None

    async def run(self) -> None:
        await self._link.run()

    def send(self, step: ScheduledStep, traces: Sequence[Trace]) -> None:
        """Sends a step, in the order of calls. traces: parallel to step.new_requests."""
        self._link.post(convert.from_step(step, traces))

    async def compile(self, grammar: Grammar) -> None:
        """Compiles a grammar on the executor. Raises grpc.aio.AioRpcError; INVALID_ARGUMENT has the error in the
        grammar."""
        await self._stub.CompileGrammar(executor_pb2.CompileGrammarRequest(grammar=grammar))

    async def load(self, weights: Weights) -> Weights:
        """Makes the executor load weights in addition to its own; returns them with version and digest. Raises
        grpc.aio.AioRpcError."""
        request = executor_pb2.LoadWeightsRequest(weights=convert.from_weights(weights))
        return convert.to_weights((await self._stub.LoadWeights(request)).weights)

    async def drop(self) -> None:
        """Makes the executor drop loaded but unused weights. Raises grpc.aio.AioRpcError."""
        await self._stub.DropWeights(executor_pb2.DropWeightsRequest())

    def start_over(self, reason: str) -> None:
        """Closes the stream; a new one follows."""
        self._link.start_over(reason)

    async def on_connect(self, send: Callable[[executor_pb2.StepRequest], Awaitable[None]]) -> None:
        # The answer comes once the weights are loaded, which may take minutes; keep-alive detects a crash meanwhile.
        description = await self._stub.Describe(executor_pb2.DescribeRequest(), wait_for_ready=True)
        while await self._listener.slept(description):
            description = await self._stub.Describe(executor_pb2.DescribeRequest(), wait_for_ready=True)
        present = convert.to_weights(description.weights)
        wanted = self._listener.on_described(description.incarnation, present)
        if wanted != present:
            await self._install(wanted)
            # Its blocks have another format now, which is what makes it keep them.
            description = await self._stub.Describe(executor_pb2.DescribeRequest())
            if convert.to_weights(description.weights) != wanted:
                raise RpcError(grpc.StatusCode.UNAVAILABLE, "it was started anew while its weights were replaced")
        self._description = description
        await send(executor_pb2.StepRequest(term=self.term))

    async def _install(self, weights: Weights) -> None:
        """Switches the executor to other weights. Raises RpcError if this fails; the next stream tries again."""
        try:
            await self.load(weights)
            request = executor_pb2.InstallWeightsRequest(weights=convert.from_weights(weights), term=self.term)
            await self._stub.InstallWeights(request)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise
            raise RpcError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"it cannot load weights {weights.version} of {weights.model}, which are in force: {error.details()}",
            ) from error

    def on_message(self, message: executor_pb2.StepResult) -> None:
        if self._is_open:
            self._listener.on_result(convert.to_step_result(message), convert.to_step_clock(message))
            return
        if message.step_id != 0 or self._description is None:
            raise InvalidResult(f"the executor answered step {message.step_id} on a stream that is not open")
        self._listener.on_executor(convert.to_executor_info(self._description))
        self._is_open, self.was_refused = True, False
        self._pings.is_serving = True  # the previous process may have set it to False

    def _on_ping(self) -> None:
        if self._is_open:
            self._listener.on_leaving(not self._pings.is_serving)

    def on_disconnect(self, end: StreamEnd) -> None:
        self._description = None
        was_open, self._is_open = self._is_open, False
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            return  # this service is stopping, so the executor is not lost
        if was_open:
            self._listener.on_executor_lost(_loss_of(end), end.text)
        elif end.code is grpc.StatusCode.FAILED_PRECONDITION and not self.was_refused:
            self.was_refused = True
            logger.warning("the executor at %s cannot be used (%s); trying again", self._address, end.text)


def _loss_of(end: StreamEnd) -> Loss:
    if end.starts_over:
        return Loss.WEIGHTS  # nothing else starts over
    if end.code is grpc.StatusCode.OK:
        return Loss.LEFT_TO_OTHERS
    return _LOSSES.get(end.reason, Loss.SILENT)
