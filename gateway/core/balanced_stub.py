"""Calls outside the link's streams: each goes to the tokenizer service with the fewest requests."""

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import grpc

from pagewire.gateway.core.errors import ApiError
from pagewire.v1 import inference_pb2
from pagewire.v1.admin_pb2 import (
    AdminServiceLoadAdapterResponse,
    AdminServiceUnloadAdapterResponse,
    ReplaceWeightsResponse,
    ResetPrefixCacheResponse,
    SleepModelResponse,
    WakeModelResponse,
)
from pagewire.wire.streams import ResubmittingLink

AWAY = "the tokenizer service cannot be reached; try again"

Answered = TypeVar("Answered")
Method = Callable[..., Awaitable[Answered]]
"""A unary method of a stub: request, timeout=seconds, metadata=pairs -> answer."""


class OutputStream(Protocol):
    """The outputs of a generation, until its end."""

    def __aiter__(self) -> AsyncIterator[inference_pb2.GenerateResponse]: ...

    def cancel(self) -> bool: ...


class InferenceStub(Protocol):
    """The methods of `InferenceService` that the gateway calls; what grpc generates has no types."""

    AbortRequests: Method[inference_pb2.AbortRequestsResponse]
    Classify: Method[inference_pb2.ClassifyResponse]
    CountRequests: Method[inference_pb2.CountRequestsResponse]
    Detokenize: Method[inference_pb2.DetokenizeResponse]
    Embed: Method[inference_pb2.EmbedResponse]
    Generate: Callable[..., OutputStream]
    GetTokenizerInfo: Method[inference_pb2.GetTokenizerInfoResponse]
    ListModels: Method[inference_pb2.ListModelsResponse]
    Score: Method[inference_pb2.ScoreResponse]
    Tokenize: Method[inference_pb2.TokenizeResponse]


class AdminStub(Protocol):
    """The methods of `AdminService` that the gateway calls."""

    LoadAdapter: Method[AdminServiceLoadAdapterResponse]
    ReplaceWeights: Method[ReplaceWeightsResponse]
    ResetPrefixCache: Method[ResetPrefixCacheResponse]
    SleepModel: Method[SleepModelResponse]
    UnloadAdapter: Method[AdminServiceUnloadAdapterResponse]
    WakeModel: Method[WakeModelResponse]


class BalancedStub:
    """Has the methods of a gRPC stub. They raise ApiError 503 while no tokenizer service is known."""

    def __init__(self, link: ResubmittingLink[Any, Any, Any], make_stub: Callable[[grpc.aio.Channel], Any]) -> None:
        self._link = link
        self._make_stub = make_stub

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, name)

    def _call(self, name: str, request: object, **options: Any) -> Any:
        peer = self._link.choose() or next(iter(self._link.peers), None)
        if peer is None:
            raise ApiError(503, AWAY)
        call = getattr(self._make_stub(peer.channel), name)(request, **options)
        peer.num_calls += 1

        def ended(_: object) -> None:
            peer.num_calls -= 1

        call.add_done_callback(ended)
        return call
