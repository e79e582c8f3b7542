"""Calls of every tokenizer service of a model."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import grpc

from pagewire.gateway.core.balanced_stub import InferenceStub, Method
from pagewire.gateway.core.request_context import time_left
from pagewire.gateway.core.tokenizer_client import CALL_TIMEOUT_S, TokenizerClient, has_died
from pagewire.v1 import inference_pb2_grpc

Answered = TypeVar("Answered")


async def call_each(
    tokenizer: TokenizerClient,
    method_of: Callable[[InferenceStub], Method[Answered]],
    request: object,
    metadata: Sequence[tuple[str, str]] = (),
) -> list[Answered]:
    """Makes a unary call that needs no model to every service that is up, otherwise like TokenizerClient.call()."""
    peers = [peer for peer in tokenizer.link.peers if peer.is_up]
    if len(peers) < 2:
        return [await tokenizer.call(method_of(tokenizer.inference), request, metadata, needs_model=False)]
    stubs = [cast(InferenceStub, inference_pb2_grpc.InferenceServiceStub(peer.channel)) for peer in peers]
    left = time_left()
    timeout = CALL_TIMEOUT_S if left is None else min(CALL_TIMEOUT_S, left)
    answers = await asyncio.gather(
        *(method_of(stub)(request, timeout=timeout, metadata=metadata) for stub in stubs), return_exceptions=True
    )
    for answer in answers:
        # The requests of a service that dies continue elsewhere.
        if isinstance(answer, BaseException) and not (isinstance(answer, grpc.aio.AioRpcError) and has_died(answer)):
            raise answer
    return [answer for answer in answers if not isinstance(answer, BaseException)]
