"""ExecutorService: Describe, and the one stream of steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc

from pagewire.rpc import RpcError, cancel
from protos.pagewire.v1 import executor_pb2, executor_pb2_grpc
from services.executor import convert
from services.executor.startup import ExecutorInfo
from services.executor.step import ProtocolError
from services.executor.worker import DeviceError, Session, Worker

# None: the session was closed and all its results are there.
_Results = asyncio.Queue[executor_pb2.StepResult | Exception | None]


class ExecutorServicer(executor_pb2_grpc.ExecutorServiceServicer):
    """Thin: messages in, messages out; the worker executes."""

    def __init__(self, worker: Worker, progress: Callable[[], str]) -> None:
        """progress says what loading is at, for callers who come too early."""
        self._worker = worker
        self._progress = progress
        self._current: _Results | None = None

    def _info(self) -> ExecutorInfo:
        loaded = self._worker.loaded
        if not loaded.done():
            raise RpcError(grpc.StatusCode.UNAVAILABLE, f"the model is still loading: {self._progress()}")
        return loaded.result()

    async def Describe(
        self, request: executor_pb2.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> executor_pb2.DescribeResponse:
        return convert.describe_response(self._info())

    async def Execute(
        self, request_iterator: AsyncIterator[executor_pb2.StepRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[executor_pb2.StepResult]:
        self._info()
        results: _Results = asyncio.Queue()
        if self._current is not None:
            self._current.put_nowait(RpcError(grpc.StatusCode.ABORTED, "superseded by a new Execute stream"))
        self._current = results
        loop = asyncio.get_running_loop()

        def deliver(result: executor_pb2.StepResult | Exception | None) -> None:
            loop.call_soon_threadsafe(results.put_nowait, result)

        session = self._worker.open(deliver)
        reader = asyncio.create_task(self._read(request_iterator, session, results), name="executor-steps")
        try:
            while (result := await results.get()) is not None:
                if isinstance(result, ProtocolError | DeviceError):
                    raise RpcError(grpc.StatusCode.INTERNAL, str(result))
                if isinstance(result, Exception):
                    raise result
                yield result
        finally:
            await cancel([reader])
            self._worker.close(session)
            if self._current is results:
                self._current = None

    async def _read(
        self, requests: AsyncIterator[executor_pb2.StepRequest], session: Session, results: _Results
    ) -> None:
        """Feeds the worker until the scheduler half-closes its side."""
        try:
            async for request in requests:
                self._worker.submit(session, convert.step_from_proto(request))
        except Exception as error:
            # Whatever it is, it ends the stream: raised by Execute.
            results.put_nowait(error)
        else:
            self._worker.close(session)
