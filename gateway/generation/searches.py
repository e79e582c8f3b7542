"""Requests that return no output before their end: best_of and beam search.

The tokenizer service searches. The client receives nothing before the end, so a search restarts with the same seed if
that service dies.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import grpc

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.reply import PendingChoice, Reply
from pagewire.gateway.core.request_context import receiving
from pagewire.gateway.core.tokenizer_client import TokenizerClient
from pagewire.telemetry.trace import NO_TRACE, Trace
from pagewire.v1.common_pb2 import RequestContext
from pagewire.v1.inference_pb2 import GenerateRequest, GenerateResponse
from pagewire.wire.rpc import RpcError

logger = logging.getLogger(__name__)


class Searches:
    """A `Line` for searches, as the link to the tokenizer service is for other requests."""

    def __init__(self, tokenizer: TokenizerClient) -> None:
        self._tokenizer = tokenizer

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        *,
        streaming: bool,
        context: RequestContext | None = None,
        earlier: Sequence[Sequence[GenerateResponse]] = (),
    ) -> Reply:
        """Starts the searches.

        Args:
            requests: one for each output; those of a search are the same object, side by side.
            context: the context of all requests.
            earlier: for each request, the outputs of an earlier attempt; a search has all of them or none.
        """
        tasks: list[asyncio.Task[None]] = []

        def abort(choices: Iterable[PendingChoice]) -> None:
            for task in tasks:
                task.cancel()

        reply = Reply(abort, requests, streaming=streaming, context=context)
        for start in range(0, len(requests), requests[0].n):
            choices = reply.choices[start : start + requests[0].n]
            if earlier and earlier[start]:
                for choice, [output] in zip(choices, earlier[start:], strict=False):
                    choice.add_earlier(output)
                    reply.ended_earlier()
                continue
            tasks.append(asyncio.create_task(self._run(reply, choices), name="search"))
        return reply

    async def _run(self, reply: Reply, choices: Sequence[PendingChoice]) -> None:
        request = choices[0].request
        receiving.set(None)  # the response watches its client
        trace = Trace.of(reply.context) if reply.context is not None else NO_TRACE
        try:
            responses = await self._tokenizer.call_to_its_end(self._outputs, request, trace)
        except grpc.aio.AioRpcError as error:
            reply.fail(RpcError.from_call(error))
        except ApiError as error:
            reply.fail(error)
        except Exception as error:
            # A defect; the client must not wait forever.
            logger.exception("a search failed")
            reply.fail(RpcError(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"))
        else:
            for response in responses:
                choice = choices[response.index]
                choice.add_response(response)
                reply.push(choice, response, response.ByteSize())

    async def _outputs(self, request: GenerateRequest, **call: Any) -> list[GenerateResponse]:
        responses = self._tokenizer.inference.Generate(request, **call)
        try:
            return [response async for response in responses]
        finally:
            responses.cancel()
