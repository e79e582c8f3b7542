"""One HTTP request for vectors or scores as calls of the tokenizer service, in parts, while the client is connected."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

import grpc
from fastapi import Request
from starlette.requests import ClientDisconnect

from pagewire.gateway.core import metrics
from pagewire.gateway.core.errors import ApiError, from_rpc
from pagewire.gateway.core.request_context import CLIENT_GONE, request_context
from pagewire.gateway.core.tokenizer_client import TokenizerClient
from pagewire.gateway.generation import genai
from pagewire.gateway.generation.head import Head, NamedBody, head_of
from pagewire.gateway.generation.lines import LINES
from pagewire.gateway.generation.serving import OK
from pagewire.gateway.vectors.translate import names_of
from pagewire.telemetry import semconv
from pagewire.telemetry.spans import Span
from pagewire.telemetry.trace import Trace
from pagewire.v1 import inference_pb2
from pagewire.wire.rpc import RpcError

# The size of one call. Its vectors fit into a message if they have less than 60,000 numbers each.
PART_INPUTS = 256
PART_BYTES = 16 * 1024 * 1024
PARTS_IN_FLIGHT = 4

VectorsRequest = inference_pb2.EmbedRequest | inference_pb2.ClassifyRequest | inference_pb2.ScoreRequest
Result = TypeVar("Result")
Named = TypeVar("Named", bound=NamedBody)


class VectorCall:
    """The calls of one HTTP request."""

    def __init__(self, request: Request, tokenizer: TokenizerClient, operation: str, head: Head) -> None:
        """operation: the name in metrics and spans. head: of the answer."""
        scope = request.scope
        self.tokenizer = tokenizer
        self.operation = operation
        self.prompt_tokens = 0
        self._name = f"{scope['method']} {scope['path']}"
        self._scope = scope
        self._head = head
        self._span = Span(self._name, Trace.of_client(scope["headers"]), serves=True)
        self._context = request_context(scope)
        self._context.trace_id = self._span.trace.trace_id

    async def answers(
        self, method: Callable[..., Awaitable[Any]], message: VectorsRequest, inputs: Iterable[inference_pb2.InputText]
    ) -> AsyncGenerator[Any, None]:
        """Yields the answers to the parts, in order.

        The first part is sent alone: if it is refused because too many requests wait, so is the request.

        message: a call without inputs.
        """
        message.request_id = self._context.request_id
        running: deque[asyncio.Task[Any]] = deque()

        async def answer(part: VectorsRequest) -> Any:
            answer = await self.tokenizer.call_to_its_end(method, part, self._span.trace)
            self.prompt_tokens += sum(answer.num_tokens)
            return answer

        try:
            for part in _parts(message, inputs):
                running.append(asyncio.create_task(answer(part)))
                if not part.options.first_index or len(running) == PARTS_IN_FLIGHT:
                    yield await running.popleft()
            while running:
                yield await running.popleft()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def end(self, status: int, failure: str | None) -> None:
        self._context.note = f" prompt={self.prompt_tokens}" + ("" if failure is None else f": {failure}")
        if failure is None:
            metrics.E2E_LATENCY.labels(self.operation).observe(self._context.elapsed)
        model = LINES.in_scope(self._scope).served_name(self._head.model, answered=status == OK)
        tokens = {"input": self.prompt_tokens} if failure is None else {}
        genai.observe(self._span, self.operation, (model, model), self._context.elapsed, status, tokens)
        attributes = genai.http_attributes(self._scope, status) | {
            semconv.OPERATION_NAME: genai.operation_name(self.operation),
            semconv.PROVIDER_NAME: semconv.PROVIDER,
            semconv.REQUEST_MODEL: model or None,
            semconv.RESPONSE_MODEL: model or None,
            semconv.RESPONSE_ID: self._head.id if status == OK else None,
            semconv.USAGE_INPUT_TOKENS: self.prompt_tokens,
        }
        self._span.end(attributes, error=failure if genai.error_type(status) else None)


async def serve(
    request: Request,
    operation: str,
    prefix: str,
    body: Named,
    compute: Callable[[VectorCall, Named, Any], Coroutine[Any, Any, Result]],
) -> Result:
    """Returns the result of `compute(call, body, head)`, which is cancelled if the client disconnects.

    Raises ApiError or ClientDisconnect.
    """
    request_context(request.scope).names = names_of(body)
    head = await head_of(request, body, prefix)
    call = VectorCall(request, await LINES.of(request).client(body.model), operation, head)
    status, failure = 200, None
    try:
        return await _until_gone(request, compute(call, body, head))
    except grpc.aio.AioRpcError as error:
        api_error = from_rpc(RpcError.from_call(error))
        status, failure = api_error.status, api_error.message
        raise api_error from error
    except ApiError as error:
        status, failure = error.status, error.message
        raise
    except ClientDisconnect:
        status, failure = CLIENT_GONE, "client gone"
        raise
    except BaseException as error:
        status, failure = 500, type(error).__name__
        raise
    finally:
        call.end(status, failure)


async def _until_gone(request: Request, answering: Coroutine[Any, Any, Result]) -> Result:
    answer = asyncio.create_task(answering)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    finally:
        for task in (answer, gone):
            task.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _parts(message: VectorsRequest, inputs: Iterable[inference_pb2.InputText]) -> Iterator[VectorsRequest]:
    """Yields copies of the message, each with a part of the inputs."""
    part, size = _part(message, 0), 0
    for index, one in enumerate(inputs):
        count, one_size = index - part.options.first_index, one.ByteSize()
        if count and (count == PART_INPUTS or size + one_size > PART_BYTES):
            yield part
            part, size = _part(message, index), 0
        (part.pairs if isinstance(part, inference_pb2.ScoreRequest) else part.inputs).append(one)
        size += one_size
    yield part


def _part(message: VectorsRequest, first_index: int) -> VectorsRequest:
    part = type(message)()
    part.CopyFrom(message)  # type: ignore[arg-type]  # of the same type
    part.options.first_index = first_index
    return part
