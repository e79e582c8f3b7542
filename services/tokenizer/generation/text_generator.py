"""Starts requests: checks and encodes the prompt, resolves what the scheduler must be told, submits.

Knows no gRPC call: servicers hand in a request and a function that takes its responses.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import grpc

from pagewire.services.tokenizer import stats
from pagewire.services.tokenizer.errors import invalid
from pagewire.services.tokenizer.generation.text_requests import (
    check_parameters,
    check_prompt,
    output_options,
    prompt_field,
    sampling_params,
    token_submission,
)
from pagewire.services.tokenizer.output.composed import ComposedGeneration, goes_by
from pagewire.services.tokenizer.output.detokenizer import Detokenizers
from pagewire.services.tokenizer.output.text_stream import Deliver, OutputOptions, TextStream
from pagewire.services.tokenizer.parsers.call_grammar import grammar_with_calls, tools_of
from pagewire.services.tokenizer.parsers.registry import OutputParsers
from pagewire.services.tokenizer.pool.affinity import affinity_of
from pagewire.services.tokenizer.pool.model_kind import check_generates
from pagewire.services.tokenizer.pool.pool import TokenizerPool
from pagewire.services.tokenizer.pool.text_limit import Room
from pagewire.services.tokenizer.prompts.encoder import PromptEncoder
from pagewire.services.tokenizer.prompts.prompts import Prompt, image_urls, room_for, truncated
from pagewire.services.tokenizer.record import Record
from pagewire.services.tokenizer.scheduler_link import SchedulerLink, SubmittedRequest
from pagewire.telemetry.spans import Span
from pagewire.v1 import common_pb2, inference_pb2
from pagewire.v1.inference_link_pb2 import GenerateSubmission
from pagewire.v1.scheduler_link_pb2 import TokenSubmission
from pagewire.wire.rpc import RpcError, timeout_of
from pagewire.wire.status import error_details
from pagewire.wire.streams import Draining

logger = logging.getLogger(__name__)

# Tokens that are detokenized before others get their turn: a millisecond or two.
REPLAY_PIECE = 1000


class LiveGeneration:
    """A request, from its arrival to its end."""

    def __init__(self, link: SchedulerLink, submission: GenerateSubmission, deliver: Deliver) -> None:
        self._link = link
        self._affinity = affinity_of(submission) if len(link.peers) > 1 else None
        self.request_id = submission.request.request_id
        self.tenant = submission.context.tenant
        self._deliver = deliver
        self.starting: asyncio.Task[None] | None = None
        self.stream: TextStream | None = None  # once its prompt is encoded
        self._request: SubmittedRequest | None = None  # once it is submitted

    def submit(self, message: TokenSubmission, stream: TextStream) -> None:
        """Raises RpcError (UNAVAILABLE)."""
        self._request = SubmittedRequest(message, stream, self._affinity)
        self._link.submit(self._request)

    def abort(self) -> None:
        """Ends it here and at the scheduler; nothing is delivered any more. Harmless after the end."""
        if self.starting is not None:
            self.starting.cancel()
        if self.stream is not None:
            self.stream.cancel()
        if self._request is not None:
            self._link.abort(self._request)

    def end_early(self) -> bool:
        """The same, but for its client it ends with what there is. False: it has ended before."""
        assert self.starting is not None
        if self.stream is None:
            if self.starting.done():  # with an error
                return False
            self._deliver(inference_pb2.GenerateResponse(finish_reason=common_pb2.FINISH_REASON_ABORT))
        elif self.stream.finished:
            return False
        else:
            self.stream.end_early()
        self.abort()
        return True

    def goes_by(self, request_ids: Collection[str]) -> bool:
        """Whether its id is among these, or it is a choice of a request whose id is. Without an id it never is."""
        return goes_by(self.request_id, request_ids)


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """What a request says, checked and resolved."""

    params: common_pb2.SamplingParams
    options: OutputOptions
    prompt: Prompt


class TextGenerator:
    """Everything that requests share: the pool, the vocabulary's pieces, the link to the scheduler."""

    def __init__(
        self,
        pool: TokenizerPool,
        link: SchedulerLink,
        served_model_names: tuple[str, ...],
        parsers: OutputParsers,
        defaults: common_pb2.SamplingParams,
    ) -> None:
        """defaults: of requests that name no value. Raises UnsupportedDecoderError."""
        self.pool = pool
        self.link = link
        self.served_model_names = served_model_names
        self._encoder = PromptEncoder(pool)
        self._detokenizers = Detokenizers(pool.codec.tokenizer)
        self._parsers = parsers
        self.defaults = defaults
        self._starting: set[asyncio.Task[Any]] = set()
        # All that live, and some that have ended.
        self._generations: WeakSet[LiveGeneration | ComposedGeneration] = WeakSet()
        self._replaying = asyncio.Lock()
        self.draining = Draining()

    @property
    def max_model_len(self) -> int:
        """0 = not known yet."""
        info = self.link.model_info
        return info.max_model_len if info is not None else 0

    def check_model(self, name: str) -> None:
        """Raises RpcError (NOT_FOUND) for a model that is not served; empty = the only one."""
        if name and name not in self.served_model_names:
            raise RpcError(
                grpc.StatusCode.NOT_FOUND,
                f"the model {name!r} does not exist; served here: {', '.join(self.served_model_names)}",
            )

    @property
    def num_starting(self) -> int:
        """Requests that the scheduler does not know yet: their prompts are being encoded."""
        return len(self._starting)

    async def drained(self) -> None:
        """Returns when no prompt is being encoded and no request is live at the scheduler."""
        while self._starting or self.link.num_live:
            if self._starting:
                await asyncio.wait(self._starting)
            await self.link.drained()

    @contextmanager
    def composing(self, submission: GenerateSubmission) -> Iterator[None]:
        """What the present task submits, one request after the other, is one to others: `drained` waits for its end,
        `end_early` ends it.

        Raises RpcError (ABORTED) then.
        """
        composed = ComposedGeneration(submission.request.request_id, submission.context.tenant)
        self._starting.add(composed.task)
        self._generations.add(composed)
        try:
            yield
        except asyncio.CancelledError as error:
            if composed.was_ended and not composed.task.uncancel():
                raise RpcError(grpc.StatusCode.ABORTED, "the request was ended by its id") from error
            raise
        finally:
            self._starting.discard(composed.task)
            composed.is_over = True

    def start(self, submission: GenerateSubmission, deliver: Deliver) -> LiveGeneration:
        """Its outputs go to `deliver`; the last one has a finish_reason or is an RpcError."""
        live = LiveGeneration(self.link, submission, deliver)
        self._generations.add(live)
        live.starting = asyncio.create_task(self._start(live, submission, deliver))
        self._starting.add(live.starting)
        live.starting.add_done_callback(self._starting.discard)
        return live

    def end_early(self, request_ids: Collection[str] | None, tenant: str | None = None) -> int:
        """Ends generations by their ids, None: all; those of a tenant, None: of all. Returns how many."""
        chosen = [
            one
            for one in self._generations
            if tenant in (None, one.tenant) and (request_ids is None or one.goes_by(request_ids))
        ]
        return sum([one.end_early() for one in chosen])

    async def _start(self, live: LiveGeneration, submission: GenerateSubmission, deliver: Deliver) -> None:
        request = submission.request
        record = Record(submission, self.served_model_names)
        try:
            async with asyncio.timeout(timeout_of(submission.context)):
                prepared = await self.prepare(submission, record.span)
            if submission.context.HasField("timeout"):
                left = error_details.seconds(submission.context.timeout) - (time.monotonic() - record.arrived)
                submission.context.timeout.CopyFrom(error_details.duration(max(0.0, left)))
            stream = live.stream = self.make_stream(request, prepared, deliver, record)
            stream.stop_upstream = live.abort
            stream.prompt_field = prompt_field(request)
            await self._replay(stream, submission.resume_token_ids)
            if not stream.finished:
                message = token_submission(submission, prepared.prompt, prepared.params, record.span.trace)
                record.on_submitted()
                live.submit(message, stream)
        except asyncio.CancelledError:
            record.on_cancelled()
            raise
        except Exception as error:
            if isinstance(error, TimeoutError):
                stats.EXPIRED.inc()
                why = "the request's time was up while its prompt was prepared; allow it more"
                error = RpcError(grpc.StatusCode.DEADLINE_EXCEEDED, why)
            if not isinstance(error, RpcError):
                logger.exception("a request could not be started", extra={"request_id": request.request_id})
                error = RpcError(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")
            record.on_error(error)
            deliver(error)

    async def prepare(self, submission: GenerateSubmission, span: Span) -> PreparedRequest:
        """Raises RpcError."""
        request = submission.request
        params = sampling_params(request.sampling_params, self.defaults)
        check_parameters(request, params)
        options = output_options(request, self._parsers.marks(request.output_parsing))
        given = params.grammar if params.HasField("grammar") else None
        grammar = grammar_with_calls(request, given, self._parsers)
        if grammar is not None:
            params.grammar.CopyFrom(grammar)
        self.check_model(request.model)
        check_generates(self.link.model_info)
        if submission.resume_token_ids:
            request.ClearField("truncate_prompt_tokens")  # it was cut before
        if request.truncate_prompt_tokens == -1:
            await self.link.wait_for_model()  # which says what fits
        prompt = await self._encode(submission, room_for(request, params, self.max_model_len), span)
        prompt = truncated(prompt, request, params, self.max_model_len)
        if request.bad_words:
            words = await self.pool.encode_words(request.bad_words)
            params.bad_words.extend(common_pb2.TokenSequence(token_ids=word) for word in words)
        check_prompt(prompt.token_ids, submission.resume_token_ids, prompt_field(request))
        self._add_thinking(params, request, prompt)
        return PreparedRequest(params, options, prompt)

    def make_stream(
        self,
        request: inference_pb2.GenerateRequest,
        prepared: PreparedRequest,
        deliver: Deliver,
        record: Record,
    ) -> TextStream:
        """For one output."""
        parser = self._parsers.make(request.output_parsing, prepared.prompt.token_ids, tools_of(request))
        text = request.text if request.WhichOneof("prompt") == "text" else None
        return TextStream(
            self._detokenizers, prepared.options, prepared.prompt.token_ids, deliver, record, parser, text
        )

    def _add_thinking(
        self, params: common_pb2.SamplingParams, request: inference_pb2.GenerateRequest, prompt: Prompt
    ) -> None:
        """Where the reasoning is, for requests to which that matters. Raises RpcError (INVALID_ARGUMENT)."""
        budget = request.thinking_token_budget if request.HasField("thinking_token_budget") else None
        is_apart = request.output_parsing.reasoning and params.HasField("grammar")
        if params.HasField("thinking") or (budget is None and not is_apart):
            return
        try:
            thinking = self._parsers.thinking(prompt.token_ids, budget)
        except ValueError as error:
            raise invalid(str(error), "thinking_token_budget") from error
        if thinking is not None:
            params.thinking.CopyFrom(thinking)

    async def _replay(self, stream: TextStream, token_ids: Sequence[int]) -> None:
        """In pieces and one request at a time: after a restart all come at once, and others' tokens must not wait."""
        if not token_ids:
            return
        async with self._replaying:
            for start in range(0, len(token_ids), REPLAY_PIECE):
                stream.replay(token_ids[start : start + REPLAY_PIECE])
                if stream.finished:
                    return
                await asyncio.sleep(0)

    async def _encode(self, submission: GenerateSubmission, room: Room, parent: Span) -> Prompt:
        request = submission.request
        if submission.resume_token_ids and request.WhichOneof("prompt") != "token_ids" and not image_urls(request.chat):
            raise invalid(
                "resume_token_ids needs the prompt as token_ids, as the earlier attempt reported them", "prompt"
            )
        span = Span("encode", parent.trace)
        try:
            prompt = await self._encoder.encode(request, room, resubmitted=submission.resubmitted)
        except BaseException as error:
            span.end(error=str(error) or type(error).__name__)
            raise
        span.end({"pagewire.prompt_tokens": len(prompt.token_ids)})
        return prompt
