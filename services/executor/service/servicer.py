"""ExecutorService: the one stream of steps, which belongs to the scheduler with the highest term."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import grpc

from pagewire.process.memory_return import LARGE, return_memory_after
from pagewire.services.executor.device.errors import DeviceError
from pagewire.services.executor.runner.executor_info import ExecutorInfo
from pagewire.services.executor.service import convert
from pagewire.services.executor.service.controls import Controls
from pagewire.services.executor.service.session import Results, Session, StepFailed
from pagewire.services.executor.step.limits import LARGE_STEP
from pagewire.services.executor.step.step import InvalidStep
from pagewire.v1 import executor_pb2
from pagewire.wire.local.pipe import thread_writer
from pagewire.wire.rpc import RpcError, cancel
from pagewire.wire.status.executor_failures import ExecutorFailure

# By the status code of a DeviceError or StepFailed.
_FAILURES = {
    grpc.StatusCode.UNKNOWN: ExecutorFailure.STEP_FAILED,
    grpc.StatusCode.INTERNAL: ExecutorFailure.DEVICE_FAILED,
    grpc.StatusCode.DEADLINE_EXCEEDED: ExecutorFailure.NO_PROGRESS,
    grpc.StatusCode.DATA_LOSS: ExecutorFailure.MODEL_BROKEN,
}


class ExecutorServicer(Controls):
    """Converts messages; the worker executes."""

    def close(self) -> None:
        """Ends everything that the calls have started. No call may follow."""
        if self._made is not None:
            for feature in self._made:
                feature.close()

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
                if sum(request.num_scheduled_tokens) > LARGE_STEP:
                    results.expect_large(step.step_id)
                self._worker.submit(session, step)
        except Exception as error:
            # Any error ends the stream: Execute raises it.
            results.put(error)
        else:
            self._worker.close(session)
