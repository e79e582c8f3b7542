"""The HTTP response to one generation request, whole or streamed."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import grpc
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagewire.gateway.core import metrics
from pagewire.gateway.core.answering import GENERATIONS
from pagewire.gateway.core.encoding import EVENT_STREAM_HEADERS
from pagewire.gateway.core.errors import ApiError, from_rpc
from pagewire.gateway.core.field_names import rename
from pagewire.gateway.core.outputs import ChoiceOutputs
from pagewire.gateway.core.reply import PendingChoice
from pagewire.gateway.core.request_context import (
    CLIENT_GONE,
    HANG_UP,
    IN_PROCESS,
    RequestContext,
    request_context,
    time_left,
)
from pagewire.gateway.core.shutdown import SHUTDOWN
from pagewire.gateway.generation import genai
from pagewire.gateway.generation.answer import Answer, fingerprint, finish_reason
from pagewire.gateway.generation.lines import LINES, Lines
from pagewire.gateway.generation.resumable import Outputs, Resumable
from pagewire.gateway.generation.timing import Timing
from pagewire.gateway.generation.usage import UsageTotal
from pagewire.gateway.generation.whole import content_of, send_whole
from pagewire.telemetry import semconv
from pagewire.telemetry.spans import Span
from pagewire.telemetry.trace import Trace
from pagewire.v1 import common_pb2
from pagewire.v1.inference_pb2 import GenerateRequest
from pagewire.wire import tenants
from pagewire.wire.rpc import RpcError
from pagewire.wire.status import error_details

# Seconds in which the services can report a timeout themselves.
_GRACE_S = 0.2
OK = 200


class ClientGone(Exception):
    """The client closed its connection."""


class _Interrupted(Exception):
    """A stream that any other gateway can continue breaks off, as this one ends: its client resumes it."""


class GenerationResponse(Response):
    """Runs one generation request of any API when it is sent."""

    stream_headers = EVENT_STREAM_HEADERS

    def __init__(
        self,
        requests: Sequence[GenerateRequest],
        answer: Answer,
        *,
        stream: bool,
        choices_per_prompt: int = 1,
        counts_output: bool = True,
        ended: Callable[[], Awaitable[None]] | None = None,
        kept: Resumable | None = None,
        timing: Timing | None = None,
    ) -> None:
        """
        Args:
            requests: one for each choice, those of one prompt side by side.
            counts_output: see `UsageTotal`.
            ended: called when the answer is complete, before its end is sent; it may raise ApiError.
            kept: makes the generation resumable.
            timing: is measured before the answer ends.
        """
        super().__init__()
        self._requests = requests
        self._answer = answer
        self._streaming = stream
        self._choices_per_prompt = choices_per_prompt
        self._ended = ended
        self._kept, self._timing = kept, timing
        self._counts_output = counts_output
        self._usage = UsageTotal((), 1)
        self._finish_reasons = [""] * len(requests)
        self._failure: str | None = None
        self._failed_status = 0  # of an error after the head of the answer
        self._first_chunk: float | None = None  # seconds since the request arrived

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = request_context(scope)
        span = Span(
            f"{scope['method']} {scope['path']}", Trace.of_client(scope["headers"]), serves=True, start=context.started
        )
        context.trace_id = span.trace.trace_id
        _label(self._requests, context.request_id)
        metrics.REQUEST_CHOICES.observe(self._choices_per_prompt)
        generations = GENERATIONS.in_scope(scope)
        answering = generations.begin(tenants.present.get().name, context)
        status = 0
        try:
            rpc_context = common_pb2.RequestContext(is_batch=IN_PROCESS in scope)
            tenants.attach(tenants.present.get(), span.trace.attach_to(rpc_context))
            await self._serve(scope, rpc_context, receive, send)
        except ClientGone:
            self._failure = "client gone"
            metrics.CLIENTS_GONE.inc()
            context.status = CLIENT_GONE
        except _Interrupted:
            self._failure = "interrupted; its client can continue at another gateway"
            scope[HANG_UP]()
            while (await receive())["type"] != "http.disconnect":
                pass
        except ApiError as error:
            self._failure = error.message
            status = error.status
            raise
        finally:
            context.note = f" prompt={self._usage.prompt_tokens} completion={self._usage.completion_tokens}"
            if self._failure is not None:
                context.note += f": {self._failure}"
            generations.end(answering)
            self._record(span, scope, context, status or context.status)

    async def _serve(self, scope: Scope, upstream: common_pb2.RequestContext, receive: Receive, send: Send) -> None:
        context, lines = request_context(scope), LINES.in_scope(scope)
        await lines.client(self._requests[0].model)  # raises if there is none
        try:
            reply = self._begin(lines, upstream)
        except RpcError as error:
            raise from_rpc(error) from error
        self._usage = UsageTotal(reply.choices, self._choices_per_prompt, counts_output=self._counts_output)
        watch = asyncio.create_task(_watch(receive, reply))
        give_up = _give_up_later(reply, partial(lines.waits, self._requests[0].model))
        try:
            if self._streaming:
                # In a separate task, so that a token does not wake the layers that wait for the end of the response.
                await asyncio.create_task(self._stream(reply, context, send, scope))
            else:
                await self._whole(reply, context, send)
        except RpcError as error:
            raise from_rpc(error) from error
        finally:
            watch.cancel()
            if give_up is not None:
                give_up.cancel()
            reply.abort()
        if self._failure is None:
            metrics.E2E_LATENCY.labels(self._answer.operation).observe(context.elapsed)

    def _begin(self, lines: Lines, context: common_pb2.RequestContext) -> Outputs:
        """Starts the generation. context: is sent with the requests. Raises RpcError UNAVAILABLE."""
        if (left := time_left()) is not None:
            context.timeout.CopyFrom(error_details.duration(left))
        if self._kept is not None:
            return self._kept.generate(lines, self._requests, context)
        return lines.generate(self._requests, streaming=self._streaming, context=context)

    async def _whole(self, reply: Outputs, context: RequestContext, send: Send) -> None:
        outputs = [output for _, output in sorted(await reply.whole(), key=lambda item: item[0])]
        self._finish_reasons = [finish_reason(output) for output in outputs]
        if self._timing is not None:
            await self._timing.measure(context.request_id, len(self._requests))
        content = await content_of(self._answer, reply.choices, outputs, self._usage, self._choices_per_prompt)
        if self._ended is not None:
            await self._ended()
        await send_whole(send, content, _weights_header(reply.choices))

    async def _stream(self, reply: Outputs, context: RequestContext, send: Send, scope: Scope) -> None:
        """Sends the head with the first output: until then, an error can have its own status."""
        answer, usage, started = self._answer, self._usage, False
        lines, model = LINES.in_scope(scope), self._requests[0].model
        try:
            coming: Awaitable[ChoiceOutputs] = reply.next()
            if self.stream_headers is EVENT_STREAM_HEADERS and lines.waits(model):
                coming = lines.first_outputs(coming, model, context, send)
            while outputs := await coming:
                events: list[bytes] = []
                if not started:
                    answer.start(events, reply.choices, usage)
                for index, output in outputs:
                    answer.delta(events, reply.choices[index], output, usage)
                    if output.finish_reason:
                        self._finish_reasons[index] = finish_reason(output)
                if not started:
                    started = True
                    self._first_chunk = context.elapsed
                    metrics.TIME_TO_FIRST_TOKEN.labels(answer.operation).observe(self._first_chunk)
                    headers = [*self.stream_headers, *_weights_header(reply.choices)]
                    if not context.status:
                        await send({"type": "http.response.start", "status": 200, "headers": headers})
                    send = context.send  # the middleware needs only the head
                if self._kept is not None:
                    events = self._kept.event_ids.added(events)
                if events:
                    await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
                coming = reply.next()
            last: list[bytes] = []
            if self._timing is not None:
                await self._timing.measure(context.request_id, len(self._requests))
            answer.end(last, usage)
            if self._kept is not None:
                last = self._kept.event_ids.added(last)
            if self._ended is not None:
                await self._ended()
        except (ApiError, RpcError) as error:
            api_error = from_rpc(error) if isinstance(error, RpcError) else error
            if not context.status:
                raise api_error from error
            if self._kept is not None and SHUTDOWN.in_scope(scope).over:
                raise _Interrupted from None
            rename(api_error, context.names)
            self._failure, self._failed_status = api_error.message, api_error.status
            last = []
            answer.error(last, api_error)
        await send({"type": "http.response.body", "body": b"".join(last)})

    def _record(self, span: Span, scope: Scope, context: RequestContext, status: int) -> None:
        """Ends the span and records the metrics of GenAI. status: of the answer's head."""
        operation, usage = self._answer.operation, self._usage
        outcome = self._failed_status or status
        request_model = self._requests[0].model
        served = LINES.in_scope(scope).served_name(request_model, answered=outcome == OK)
        tokens = {"input": usage.prompt_tokens, "output": usage.completion_tokens} if self._failure is None else {}
        genai.observe(span, operation, (request_model if served else "", served), context.elapsed, outcome, tokens)
        if not span.is_recorded:
            span.end()
            return
        attributes = genai.http_attributes(scope, status) | genai.generation_attributes(
            self._requests, operation, served, usage
        )
        choices = self._choices_per_prompt
        attributes |= {
            semconv.ERROR_TYPE: genai.error_type(outcome),
            semconv.REQUEST_CHOICE_COUNT: choices if choices > 1 else None,
            semconv.REQUEST_STREAM: self._streaming or None,
            semconv.RESPONSE_ID: self._answer.id if status == OK else None,
            semconv.RESPONSE_FINISH_REASONS: [reason for reason in self._finish_reasons if reason],
            semconv.RESPONSE_TIME_TO_FIRST_CHUNK: self._first_chunk,
        }
        span.end(attributes, error=self._failure if genai.error_type(outcome) else None)


def _weights_header(choices: Sequence[PendingChoice]) -> list[tuple[bytes, bytes]]:
    """Returns the header with the version of the weights; for a stream, the version known with its first output."""
    version = fingerprint(choices)
    return [] if version is None else [(b"x-weights-version", version.encode())]


async def _watch(receive: Receive, reply: Outputs) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    reply.fail(ClientGone())


def _give_up_later(reply: Outputs, waits: Callable[[], str]) -> asyncio.TimerHandle | None:
    """Ends the reply if the scheduler does not report in time that its deadline has passed."""
    if (left := time_left()) is None:
        return None

    def give_up() -> None:
        why = f"{reason} took too long" if (reason := waits()) else "the services did not answer"
        reply.fail(RpcError(grpc.StatusCode.DEADLINE_EXCEEDED, f"the request timed out: {why}"))

    return asyncio.get_running_loop().call_later(left + _GRACE_S, give_up)


def _label(requests: Sequence[GenerateRequest], request_id: str) -> None:
    for index, request in enumerate(requests):
        request.request_id = request_id if len(requests) == 1 else f"{request_id}-{index}"
