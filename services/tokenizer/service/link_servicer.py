"""The service that gateways use, and its part of a status."""

import time
from collections.abc import AsyncIterator

import grpc

from pagewire.services.tokenizer import stats
from pagewire.services.tokenizer.generation.client_session import ClientSession
from pagewire.services.tokenizer.generation.text_generator import TextGenerator
from pagewire.v1 import admin_pb2, inference_link_pb2, inference_link_pb2_grpc


class InferenceLinkServicer(inference_link_pb2_grpc.InferenceLinkServiceServicer):
    def __init__(self, generator: TextGenerator) -> None:
        self._generator = generator
        self._num_clients = 0

    def Connect(
        self, request_iterator: AsyncIterator[inference_link_pb2.ConnectRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference_link_pb2.ConnectResponse]:
        self._num_clients += 1
        context.add_done_callback(self._on_client_gone)
        return ClientSession(self._generator).responses(request_iterator)

    def _on_client_gone(self, context: grpc.aio.ServicerContext) -> None:
        self._num_clients -= 1

    def describe(self, status: admin_pb2.ServiceStatus, with_kv_maps: bool) -> None:
        now = time.monotonic()
        status.tokenizer.num_clients = self._num_clients
        status.tokenizer.num_requests = self._generator.live.num_live
        status.tokenizer.time_to_first_token.CopyFrom(stats.RECENT_FIRST_TOKENS.to_message(now))
        status.tokenizer.inter_token_latency.CopyFrom(stats.RECENT_INTER_TOKEN.to_message(now))
