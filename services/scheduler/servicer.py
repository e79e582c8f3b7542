"""The public token-level contract: parse, call the engine, convert."""

import asyncio
from collections.abc import AsyncIterator

import grpc

from pagewire import rpc
from pagewire.services.scheduler import convert
from pagewire.services.scheduler.engine import Engine
from pagewire.services.scheduler.neighbour import Neighbour
from pagewire.services.scheduler.news import MAX_UNREAD, new_outbox
from pagewire.v1 import scheduler_pb2, scheduler_pb2_grpc


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def Generate(
        self, request: scheduler_pb2.SchedulerServiceGenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[scheduler_pb2.SchedulerServiceGenerateResponse]:
        outbox = new_outbox()
        live = self._engine.submit(request.request, outbox, 0, rpc.traceparent_of(context), MAX_UNREAD)
        try:
            async for news_by_number in outbox:
                news = news_by_number[0]
                if news.error is not None:
                    raise news.error
                yield convert.from_news(news)
                if news.finish_reason is not None:
                    return
        finally:
            self._engine.abort(live)

    async def Abort(
        self, request: scheduler_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.AbortResponse:
        return scheduler_pb2.AbortResponse(num_aborted=self._engine.abort_external(set(request.external_ids)))

    async def GetLoad(
        self, request: scheduler_pb2.GetLoadRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.GetLoadResponse:
        scheduler, info = self._engine.scheduler, self._engine.info
        replicas = [replica for replica in scheduler.replicas if replica.info]
        return scheduler_pb2.GetLoadResponse(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks=sum(replica.info.num_blocks for replica in replicas if replica.info),
            num_free_blocks=sum(replica.num_free_blocks for replica in replicas),
            block_size=scheduler.info.block_size if scheduler.info else 0,
            max_num_seqs=sum(replica.max_num_seqs for replica in replicas),
            model_info=convert.from_info(info) if info else None,
            num_executors=len(replicas),
        )

    async def Connect(
        self,
        request_iterator: AsyncIterator[scheduler_pb2.SchedulerServiceConnectRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[scheduler_pb2.SchedulerServiceConnectResponse]:
        info = await self._engine.wait_for_model()
        yield scheduler_pb2.SchedulerServiceConnectResponse(hello=convert.from_info(info))
        neighbour = Neighbour(self._engine)
        reader = asyncio.create_task(neighbour.read(request_iterator), name="neighbour-reader")
        try:
            async for response in neighbour.responses():
                yield response
            # No more responses because the neighbour said its last word, or because it said something wrong.
            await reader
        finally:
            neighbour.close()
            await rpc.cancel([reader])
