"""The unary calls of ExecutorService: what is done beside steps, by the features that are handed in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import grpc

from pagewire.services.executor.runner.executor_info import ExecutorInfo
from pagewire.services.executor.service import convert
from pagewire.services.executor.service.seams import Features
from pagewire.services.executor.service.session import Results
from pagewire.services.executor.service.worker import Worker
from pagewire.v1 import executor_pb2, executor_pb2_grpc
from pagewire.wire.rpc import RpcError

# Seconds for which a scheduler with a broken stream excludes lower terms: it reconnects at once if it can.
TERM_HELD_S = 10.0


class Controls(executor_pb2_grpc.ExecutorServiceServicer):
    """Describes the executor, and hands each call to its feature."""

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
        response.MergeFrom(await features.adapters.describe())
        if features.sleep.state.level:
            response.sleep.CopyFrom(features.sleep.state)
        return response

    async def LoadWeights(
        self, request: executor_pb2.LoadWeightsRequest, context: grpc.aio.ServicerContext
    ) -> executor_pb2.LoadWeightsResponse:
        features = await self._features()
        features.sleep.check()
        return executor_pb2.LoadWeightsResponse(weights=await features.weights.load(request.weights))

    async def InstallWeights(
        self, request: executor_pb2.InstallWeightsRequest, context: grpc.aio.ServicerContext
    ) -> executor_pb2.InstallWeightsResponse:
        weights = (await self._features()).weights
        self._check_term(request.term)
        return executor_pb2.InstallWeightsResponse(seconds=await weights.install(request.weights))

    async def DropWeights(
        self, request: executor_pb2.DropWeightsRequest, context: grpc.aio.ServicerContext
    ) -> executor_pb2.DropWeightsResponse:
        (await self._features()).weights.drop()
        return executor_pb2.DropWeightsResponse()

    async def LoadAdapter(
        self, request: executor_pb2.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> executor_pb2.LoadAdapterResponse:
        features = await self._features()
        features.sleep.check()
        return executor_pb2.LoadAdapterResponse(adapter=await features.adapters.load(request.adapter))

    async def UnloadAdapter(
        self, request: executor_pb2.UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> executor_pb2.UnloadAdapterResponse:
        (await self._features()).adapters.unload(request.digest, request.name)
        return executor_pb2.UnloadAdapterResponse()

    async def CompileGrammar(
        self, request: executor_pb2.CompileGrammarRequest, context: grpc.aio.ServicerContext
    ) -> executor_pb2.CompileGrammarResponse:
        await (await self._features()).grammars.check(request.grammar)
        return executor_pb2.CompileGrammarResponse()

    async def Sleep(
        self, request: executor_pb2.SleepRequest, context: grpc.aio.ServicerContext
    ) -> executor_pb2.SleepResponse:
        sleep = (await self._features()).sleep
        self._check_term(request.term)
        return executor_pb2.SleepResponse(seconds=await sleep.fall_asleep(request.state))

    async def Wake(
        self, request: executor_pb2.WakeRequest, context: grpc.aio.ServicerContext
    ) -> executor_pb2.WakeResponse:
        sleep = (await self._features()).sleep
        self._check_term(request.term)
        return executor_pb2.WakeResponse(seconds=await sleep.wake())

    async def _features(self) -> Features:
        info = await self._loaded()
        if self._made is None:
            self._made = self._make_features(info)
        return self._made

    def _check_term(self, term: int) -> None:
        """Raises RpcError if this executor belongs to a later scheduler."""
        is_held = self._current is not None or time.monotonic() - self._left_at < TERM_HELD_S
        if term < self._term and is_held:
            raise RpcError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this executor belongs to a scheduler that started later (term {self._term}; yours is term "
                f"{term}); stop one of the two, or give each its own executors",
            )
