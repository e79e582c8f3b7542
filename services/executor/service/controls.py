"""The calls of ExecutorService for what is done beside steps: each goes to its feature."""

from collections.abc import AsyncIterator

import grpc

from pagewire.services.executor.service.servicer import ExecutorServicer
from pagewire.v1 import executor_pb2


class Controls(ExecutorServicer):
    """The whole ExecutorService."""

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
        return executor_pb2.SleepResponse(seconds=await sleep.fall_asleep(request.state, request.decided_at))

    async def Wake(
        self, request: executor_pb2.WakeRequest, context: grpc.aio.ServicerContext
    ) -> executor_pb2.WakeResponse:
        sleep = (await self._features()).sleep
        self._check_term(request.term)
        return executor_pb2.WakeResponse(seconds=await sleep.wake(request.decided_at))

    async def WatchTiers(
        self, request: executor_pb2.WatchTiersRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[executor_pb2.TierChanges]:
        async for changes in (await self._features()).tiers.watch():
            yield changes

    async def ForgetBlocks(
        self, request: executor_pb2.ForgetBlocksRequest, context: grpc.aio.ServicerContext
    ) -> executor_pb2.ForgetBlocksResponse:
        await (await self._features()).tiers.forget(request.blocks, request.reset_at)
        return executor_pb2.ForgetBlocksResponse()

    async def ReadBlocks(
        self, request: executor_pb2.ReadBlocksRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[executor_pb2.BlockContents]:
        async for contents in (await self._features()).tiers.read(request):
            yield contents
