"""The scheduler's side of the stream to its executor."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import grpc

from pagewire.services.scheduler import convert
from pagewire.services.scheduler.step import ExecutorInfo, Step, StepClock, StepResult
from pagewire.streams import Link
from pagewire.v1 import executor_pb2, executor_pb2_grpc


class ExecutorListener(Protocol):
    """Who wants to know. Calls come one at a time."""

    def on_executor(self, info: ExecutorInfo) -> None:
        """An executor is there, with empty rows and an empty KV cache; steps are counted from 1."""

    def on_result(self, result: StepResult, clock: StepClock) -> None:
        """A step is done. ProtocolError ends the stream; a new one follows."""

    def on_executor_lost(self, reason: str) -> None:
        """The executor is gone, with everything that was in flight; on_executor may follow."""


class ExecutorClient:
    """Finds the executor, sends it steps and reports their results; starts over for as long as `run()` runs.

    Every stream begins with Describe: a new stream empties the executor's rows and KV cache, and behind the address may
    be another process with another capacity.
    """

    def __init__(self, channel: grpc.aio.Channel, listener: ExecutorListener) -> None:
        self._stub = executor_pb2_grpc.ExecutorServiceStub(channel)
        self._listener = listener
        self._is_known = False
        self._link: Link[executor_pb2.StepRequest, executor_pb2.StepResult] = Link("executor", self._stub.Execute, self)

    async def run(self) -> None:
        await self._link.run()

    async def send(self, step: Step, traceparents: Sequence[str]) -> None:
        """Sends in call order; traceparents are parallel to step.new_requests."""
        await self._link.send(convert.from_step(step, traceparents))

    async def on_connect(self, send: Callable[[executor_pb2.StepRequest], Awaitable[None]]) -> bool:
        # Answers once the weights are loaded, which may take minutes; keep-alive notices if the process dies meanwhile.
        description = await self._stub.Describe(executor_pb2.DescribeRequest())
        self._is_known = True
        self._listener.on_executor(convert.to_executor_info(description))
        return True

    def on_message(self, message: executor_pb2.StepResult) -> None:
        self._listener.on_result(convert.to_step_result(message), convert.to_step_clock(message))

    def on_disconnect(self, reason: str) -> None:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            return  # the service stops: it leaves the executor, not the other way round
        if self._is_known:
            self._is_known = False
            self._listener.on_executor_lost(reason)
