"""ExecutorService: Describe, and the one stream of steps, which belongs to the scheduler with the highest term."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import grpc

from pagewire.process.memory_return import LARGE, return_memory_after
from pagewire.services.executor.device.errors import DeviceError
from pagewire.services.executor.runner.executor_info import ExecutorInfo
from pagewire.services.executor.service import convert
from pagewire.services.executor.service.seams import Features
from pagewire.services.executor.service.session import Results, Session, StepFailed
from pagewire.services.executor.service.worker import Worker
from pagewire.services.executor.step.limits import LARGE_STEP
from pagewire.services.executor.step.step import InvalidStep
from pagewire.v1 import executor_pb2, executor_pb2_grpc
from pagewire.wire.local.pipe import thread_writer
from pagewire.wire.rpc import RpcError, cancel
from pagewire.wire.status.executor_failures import ExecutorFailure

# Seconds for which a scheduler with a broken stream excludes lower terms: it reconnects at once if it can.
TERM_HELD_S = 10.0
# By the status code of a DeviceError or StepFailed.
_FAILURES = {
    grpc.StatusCode.UNKNOWN: ExecutorFailure.STEP_FAILED,
    grpc.StatusCode.INTERNAL: ExecutorFailure.DEVICE_FAILED,
    grpc.StatusCode.DEADLINE_EXCEEDED: ExecutorFailure.NO_PROGRESS,
    grpc.StatusCode.DATA_LOSS: ExecutorFailure.MODEL_BROKEN,
}


class ExecutorServicer(executor_pb2_grpc.ExecutorServiceServicer):
    """Converts messages; the worker executes. `Controls` adds what is done beside steps."""

    def __init__(
        self,
        worker: Worker,
        make_features: Callable[[ExecutorInfo], Features],
    ) -> None:
        """make_features: called once, when the model is loaded."""
        self._worker = worker
        self._make_features = make_features
        self._made: Features | None = None
        self._current: Results | None = None
        self._term = 0  # of the scheduler that has, or last had, this executor
        self._left_at = 0.0  # when its stream ended, time.monotonic()

    async def _loaded(self) -> ExecutorInfo:
        """Waits, possibly minutes, until steps can be executed. Raises RpcError UNAVAILABLE when they no longer can."""
        if self._worker.is_ending:
            raise RpcError(grpc.StatusCode.UNAVAILABLE, "the executor is stopping; retry with its successor")
        try:
            # Shielded: a caller that disconnects must not cancel the loading.
            return await asyncio.shield(asyncio.wrap_future(self._worker.loaded))
        except Exception as error:
            raise RpcError(grpc.StatusCode.INTERNAL, f"the model could not be loaded: {error}") from error

    async def Describe(
        self, request: executor_pb2.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> executor_pb2.DescribeResponse:
        info, features = await self._loaded(), await self._features()
        response = convert.describe_response(info, await features.weights.in_force())
        await features.tiers.describe(response)  # at once: for the weights that are in force
        response.MergeFrom(await features.adapters.describe())
        features.sleep.describe(response)
        return response

    async def _features(self) -> Features:
        info = await self._loaded()
        if self._made is None:
            self._made = self._make_features(info)
        return self._made

    async def close(self) -> None:
        """Ends everything that the calls have started. No call may follow."""
        if (made := self._made) is not None:
            for feature in (made.grammars, made.weights, made.adapters, made.sleep):
                feature.close()
            await made.tiers.close()

    async def Execute(
        self, request_iterator: AsyncIterator[executor_pb2.StepRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[executor_pb2.StepResult]:
        info = await self._loaded()
        opening = await anext(request_iterator, None)
        if opening is None:
            return
        (await self._features()).sleep.check()
        self._take(opening)
        results = Results(asyncio.get_running_loop(), thread_writer(context))
        if self._current is not None:
            self._current.put(
                RpcError(
                    grpc.StatusCode.ABORTED,
                    "the executor is superseded: a new Execute stream has taken over",
                    reason=ExecutorFailure.SUPERSEDED,
                )
            )
        self._current = results
        session = self._worker.open(results.deliver)
        reading = self._read(request_iterator, info, session, results)
        reader = asyncio.create_task(reading, name="executor-steps")
        try:
            yield executor_pb2.StepResult()  # the stream is open
            while (result := await results.next()) is not None:
                if isinstance(result, InvalidStep):
                    raise RpcError(grpc.StatusCode.INTERNAL, str(result))
                if isinstance(result, DeviceError | StepFailed):
                    raise RpcError(result.code, str(result), reason=_FAILURES.get(result.code, ""))
                if isinstance(result, Exception):
                    raise result
                if results.was_large(result):
                    return_memory_after(LARGE)
                yield result
        finally:
            self._worker.close(session)
            if self._current is results:
                self._current = None
                self._left_at = time.monotonic()
            await cancel([reader])

    def _take(self, opening: executor_pb2.StepRequest) -> None:
        """Assigns the executor to the scheduler that opens a stream. Raises RpcError if it belongs to a later one."""
        if opening.step_id != 0:
            raise RpcError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"a stream begins with step_id 0 and the scheduler's term, not with step {opening.step_id}",
            )
        self._check_term(opening.term)
        self._term = opening.term

    def _check_term(self, term: int) -> None:
        """Raises RpcError if this executor belongs to a later scheduler."""
        is_held = self._current is not None or time.monotonic() - self._left_at < TERM_HELD_S
        if term < self._term and is_held:
            raise RpcError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this executor belongs to a scheduler that started later (term {self._term}; yours is term "
                f"{term}); stop one of the two, or give each its own executors",
            )

    async def _read(
        self,
        requests: AsyncIterator[executor_pb2.StepRequest],
        info: ExecutorInfo,
        session: Session,
        results: Results,
    ) -> None:
        """Feeds the worker until the scheduler half-closes its side."""
        try:
            async for request in requests:
                step = convert.step_from_proto(request, info.vocab_size)
                if step.new_requests or step.slot_changes:
                    features = await self._features()
                    step = await features.adapters.attach(await features.grammars.attach(step))
                if request.saves or request.loads:
                    step = (await self._features()).tiers.attach(step, request, results.deliver)
                if sum(request.num_scheduled_tokens) > LARGE_STEP:
                    results.expect_large(step.step_id)
                self._worker.submit(session, step)
        except Exception as error:
            # Any error ends the stream: Execute raises it.
            results.put(error)
        else:
            self._worker.close(session)
