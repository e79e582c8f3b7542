"""The path of a request for text through this service: five stages, each passed once.

    receive   `TextGenerator.start` takes a request in; a separate task (`Generation._run`) takes it through the rest
    prepare   its parameters are checked and resolved, its prompt is rendered and encoded: a `PreparedRequest`
    open      a `TextStream` is ready for its tokens; the output of an earlier attempt goes in first
    submit    the scheduler gets it; from then on the link hands its tokens to the stream
    end       the stream delivers the last response, or the client aborts it, or a call ends it by its id

Features join through interfaces: reasoning and tool calls through `OutputReading`, images through the pool's
`ImageReader`, requests with several outputs by one generation for each (`choices/`). Nothing here depends on gRPC.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from pagewire.services.tokenizer import stats
from pagewire.services.tokenizer.generation.infill_requests import infill_end_ids
from pagewire.services.tokenizer.generation.live_generations import LiveGenerations
from pagewire.services.tokenizer.generation.request_defaults import RequestDefaults
from pagewire.services.tokenizer.generation.text_requests import (
    check_parameters,
    check_prompt,
    output_options,
    prompt_field,
    sampling_params,
    token_submission,
)
from pagewire.services.tokenizer.output.detokenizer import Detokenizers
from pagewire.services.tokenizer.output.reading import OutputReading
from pagewire.services.tokenizer.output.text_stream import Deliver, OutputOptions, TextStream
from pagewire.services.tokenizer.pool.model_kind import check_generates
from pagewire.services.tokenizer.pool.pool import TokenizerPool
from pagewire.services.tokenizer.pool.text_limit import Room
from pagewire.services.tokenizer.prompts.encoder import PromptEncoder
from pagewire.services.tokenizer.prompts.prompts import Prompt
from pagewire.services.tokenizer.prompts.truncation import room_for, truncated
from pagewire.services.tokenizer.received import Received
from pagewire.services.tokenizer.record import Record
from pagewire.services.tokenizer.scheduler_link import SchedulerLink, SubmittedRequest, TokenListener
from pagewire.services.tokenizer.served_models import ServedModels
from pagewire.telemetry.spans import Span
from pagewire.telemetry.trace import Trace
from pagewire.v1 import common_pb2, inference_pb2
from pagewire.wire.rpc import RpcError, timeout_of
from pagewire.wire.streams import Affinity, Draining

logger = logging.getLogger(__name__)

# Tokens that are detokenized before other requests get their turn: a millisecond or two.
REPLAY_PIECE = 1000


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that the scheduler can take: checked, resolved and encoded."""

    received: Received
    params: common_pb2.SamplingParams
    options: OutputOptions
    prompt: Prompt
    adapter: common_pb2.Adapter | None  # with the contents that compute all of its tokens
    affinity: Affinity | None  # to requests that should go to the same scheduler


class TextGenerator:
    """The stages, and what all requests share: the pool, the vocabulary's pieces, the link to the scheduler."""

    def __init__(
        self,
        pool: TokenizerPool,
        link: SchedulerLink,
        models: ServedModels,
        reading: OutputReading,
        defaults: RequestDefaults,
    ) -> None:
        """Raises UnsupportedDecoderError."""
        self.pool = pool
        self.link = link
        self.models = models
        self.defaults = defaults
        self.live = LiveGenerations(link)
        self.draining = Draining()
        self._reading = reading
        self._encoder = PromptEncoder(pool)
        self._detokenizers = Detokenizers(pool.codec.tokenizer)
        self._replaying = asyncio.Lock()

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request; 0: not known yet."""
        info = self.link.model_info
        return info.max_model_len if info is not None else 0

    # -- receive -----------------------------------------------------------------------------------------------------

    def start(self, received: Received, deliver: Deliver) -> "Generation":
        """Starts a generation. Its outputs go to `deliver`; the last one has a finish_reason or is an RpcError."""
        generation = Generation(self, received, deliver)
        self.live.add(generation, generation.preparing)
        return generation

    # -- prepare -----------------------------------------------------------------------------------------------------

    async def prepare(self, received: Received, span: Span) -> PreparedRequest:
        """Checks a request, resolves its parameters and encodes its prompt. Raises RpcError."""
        request = received.request
        params = sampling_params(received.given, self.defaults.of(received.given))
        check_parameters(received, params)
        self._reading.constrain(request, params)
        adapter = await self.models.find(request.model, received.adapter_digest)
        check_generates(self.link.model_info)
        info = self.link.model_info
        ends = info.eos_token_ids if info is not None else ()
        model = request.model or self.models.names[0]
        params.stop_token_ids.extend(infill_end_ids(received, self.pool.codec.tokenizer.fill_in_middle, model, ends))
        room = await self._room(received, params)
        prompt = truncated(await self._encode(received, room, span), room)
        if request.bad_words:
            words = await self.pool.encode_words(request.bad_words)
            params.bad_words.extend(common_pb2.TokenSequence(token_ids=word) for word in words)
        check_prompt(received, prompt)
        self._reading.on_prompt(request, params, prompt.token_ids)
        options = output_options(received, self._reading.marks(request), "" if adapter is None else adapter.digest)
        return PreparedRequest(received, params, options, prompt, adapter, self.link.affinity_of(received))

    async def _room(self, received: Received, params: common_pb2.SamplingParams) -> Room:
        if received.resume_token_ids:  # the earlier attempt has already cut the prompt
            return Room(self.max_model_len, counts=False)
        if received.request.truncate_prompt_tokens == -1:
            await self.link.wait_for_model()  # for its max_model_len
        return room_for(received.request, params, self.max_model_len)

    async def _encode(self, received: Received, room: Room, parent: Span) -> Prompt:
        span = Span("encode", parent.trace)
        try:
            prompt = await self._encoder.encode(received.request, room, resubmitted=received.resubmitted)
        except BaseException as error:
            span.end(error=str(error) or type(error).__name__)
            raise
        span.end({"pagewire.prompt_tokens": len(prompt.token_ids)})
        return prompt

    # -- open --------------------------------------------------------------------------------------------------------

    def open(self, prepared: PreparedRequest, deliver: Deliver, record: Record) -> TextStream:
        """Returns the stream of one output."""
        request, token_ids = prepared.received.request, prepared.prompt.token_ids
        return TextStream(
            self._detokenizers,
            prepared.options,
            token_ids,
            deliver,
            record,
            self._reading.reader(request, token_ids),
            request.text if request.WhichOneof("prompt") == "text" and not request.suffix else None,
            prompt_field(request),
        )

    async def replay(self, stream: TextStream, token_ids: Sequence[int]) -> None:
        """Feeds the output of an earlier attempt into a stream; may finish it.

        In pieces, one request at a time: after a restart all come at once, and tokens of other requests must not wait.
        """
        if not token_ids:
            return
        async with self._replaying:
            for start in range(0, len(token_ids), REPLAY_PIECE):
                stream.replay(token_ids[start : start + REPLAY_PIECE])
                if stream.finished:
                    return
                await asyncio.sleep(0)

    # -- submit ------------------------------------------------------------------------------------------------------

    def submit(self, prepared: PreparedRequest, listener: TokenListener, trace: Trace) -> SubmittedRequest:
        """Hands a request to the scheduler. trace: of this service's own span. Raises RpcError (UNAVAILABLE)."""
        received = prepared.received
        message = token_submission(received, prepared.prompt, prepared.params, prepared.adapter, trace)
        submitted = SubmittedRequest(message, listener, prepared.affinity, received.deadline)
        self.link.submit(submitted)
        return submitted


class Generation:
    """One request, from its arrival to its end."""

    def __init__(self, generator: TextGenerator, received: Received, deliver: Deliver) -> None:
        self.request_id = received.request.request_id
        self.tenant = received.context.tenant
        self._generator = generator
        self._received = received
        self._deliver = deliver
        self._record = Record(received, generator.models.label(received.request.model))
        self._stream: TextStream | None = None  # once the prompt is encoded
        self._submitted: SubmittedRequest | None = None  # once the scheduler has it
        self.preparing = asyncio.create_task(self._run())

    async def _run(self) -> None:
        generator, received = self._generator, self._received
        try:
            async with asyncio.timeout(timeout_of(received.context)):
                prepared = await generator.prepare(received, self._record.span)
            stream = self._stream = generator.open(prepared, self._deliver, self._record)
            stream.stop_upstream = self.abort
            await generator.replay(stream, received.resume_token_ids)
            if not stream.finished:
                self._record.on_submitted()
                self._submitted = generator.submit(prepared, stream, self._record.span.trace)
        except asyncio.CancelledError:
            if self._stream is None:
                self._record.on_cancelled()
            raise
        except Exception as error:
            self._fail(self._as_rpc_error(error))

    def _as_rpc_error(self, error: Exception) -> RpcError:
        if isinstance(error, RpcError):
            return error
        if isinstance(error, TimeoutError):
            stats.EXPIRED.inc()
            return RpcError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "the deadline passed while the prompt was prepared; allow the request more time",
            )
        logger.exception("a request could not be started", extra={"request_id": self.request_id})
        return RpcError(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")

    def _fail(self, error: RpcError) -> None:
        if self._stream is not None:
            self._stream.on_error(error)
        else:
            self._record.on_error(error)
            self._deliver(error)

    def abort(self) -> None:
        """Ends it here and at the scheduler; nothing more is delivered. Harmless after the end."""
        self.preparing.cancel()
        if self._stream is not None:
            self._stream.cancel()
        if self._submitted is not None:
            self._generator.link.abort(self._submitted)

    def end_early(self) -> bool:
        """Ends it; the client receives the output until then as the end. Returns False if it had already ended."""
        if self._stream is not None:
            if self._stream.finished:
                return False
            self._stream.end_early()
        elif self.preparing.done():  # with an error
            return False
        else:
            self._deliver(inference_pb2.GenerateResponse(finish_reason=common_pb2.FINISH_REASON_ABORT))
        self.abort()
        return True
