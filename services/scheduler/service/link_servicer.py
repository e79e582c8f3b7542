"""The gRPC service for tokenizer services."""

from collections.abc import AsyncIterator

import grpc

from pagewire.services.scheduler.service.engine import Engine
from pagewire.services.scheduler.service.tokenizer_session import TokenizerSession
from pagewire.v1 import scheduler_link_pb2, scheduler_link_pb2_grpc


class SchedulerLinkServicer(scheduler_link_pb2_grpc.SchedulerLinkServiceServicer):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def Connect(
        self,
        request_iterator: AsyncIterator[scheduler_link_pb2.SchedulerLinkServiceConnectRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[scheduler_link_pb2.SchedulerLinkServiceConnectResponse]:
        return TokenizerSession(self._engine).responses(request_iterator)
