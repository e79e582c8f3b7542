"""The calls that only pass to one feature."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from pagewire.services.executor.service.seams import Features
from pagewire.v1 import executor_pb2, executor_pb2_grpc


class FeatureCalls(executor_pb2_grpc.ExecutorServiceServicer):
    """Each call converts its message and calls the feature, once the model is loaded."""

    async def _features(self) -> Features:
        """Waits until the model is loaded. Raises RpcError."""
        raise NotImplementedError

    async def LoadWeights(
        self, request: executor_pb2.LoadWeightsRequest, context: grpc.aio.ServicerContext
    ) -> executor_pb2.LoadWeightsResponse:
        weights = (await self._features()).weights
        return executor_pb2.LoadWeightsResponse(weights=await weights.load(request.weights))

    async def DropWeights(
        self, request: executor_pb2.DropWeightsRequest, context: grpc.aio.ServicerContext
    ) -> executor_pb2.DropWeightsResponse:
        (await self._features()).weights.drop()
        return executor_pb2.DropWeightsResponse()

    async def LoadAdapter(
        self, request: executor_pb2.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> executor_pb2.LoadAdapterResponse:
        adapters = (await self._features()).adapters
        return executor_pb2.LoadAdapterResponse(adapter=await adapters.load(request.adapter))

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

    async def WatchTiers(
        self, request: executor_pb2.WatchTiersRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[executor_pb2.TierChanges]:
        async for changes in (await self._features()).tiers.watch():
            yield changes

    async def ForgetBlocks(
        self, request: executor_pb2.ForgetBlocksRequest, context: grpc.aio.ServicerContext
    ) -> executor_pb2.ForgetBlocksResponse:
        await (await self._features()).tiers.forget(request.blocks)
        return executor_pb2.ForgetBlocksResponse()

    async def ReadBlocks(
        self, request: executor_pb2.ReadBlocksRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[executor_pb2.BlockContents]:
        async for contents in (await self._features()).tiers.read(request):
            yield contents
