"""Responses in the background: any gateway process of the host generates them, and any returns their events.

Each is a job of the store. If its owner dies, the next one continues after the outputs in the log, as after the death
of a service.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

from google.protobuf.message import DecodeError as ProtobufDecodeError
from msgspec import DecodeError
from msgspec.structs import replace

from pagewire.gateway.core.app_state import AppState
from pagewire.gateway.core.encoding import encode
from pagewire.gateway.core.errors import ApiError, from_rpc
from pagewire.gateway.core.shutdown import GracefulShutdown
from pagewire.gateway.generation.lines import Lines
from pagewire.gateway.kept.entries import by_choice
from pagewire.gateway.kept.writing import Source, written
from pagewire.gateway.models.comments import COMMENT_S, comment_of
from pagewire.gateway.responses.answer import response_usage
from pagewire.gateway.responses.bodies.answers import ModelResponse
from pagewire.gateway.responses.stored import Responses, Stored, has_ended, response_of, status_of
from pagewire.gateway.responses.writer import ResponseWriter
from pagewire.gateway.store import Jobs, Lease, LeaseLost
from pagewire.v1.common_pb2 import RequestContext
from pagewire.v1.inference_pb2 import GenerateRequest, GenerateResponse
from pagewire.wire import rpc, tenants
from pagewire.wire.rpc import RpcError

logger = logging.getLogger(__name__)

# Responses that one process generates at once.
MAX_RUNNING = 256
# The least time between two entries of a response, and between two reads of its entries for clients of its events.
# Most clients want only the end, so entries are larger and fewer than those of kept streams.
WRITE_S = 0.1
# The pause after a temporary refusal: too many requests, or no engine.
PAUSE_S = 1.0
# The number of gateway processes that may die during a response before it fails: it may be the cause.
MAX_LOST_LEASES = 3
CANCEL_TIMEOUT_S = 5.0


class Background:
    """Generates the background responses that one gateway process claims, whichever process created them."""

    def __init__(self, lines: Lines, responses: Responses, jobs: Jobs) -> None:
        self._lines = lines
        self._responses = responses
        self._jobs = jobs
        self._log = jobs.log
        self._room = asyncio.Semaphore(MAX_RUNNING)

    async def run(self) -> None:
        """Runs until cancelled; another process, or the next one, continues unfinished responses."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._room.acquire()
                try:
                    lease = await self._jobs.next()
                except ApiError as error:
                    logger.error("background responses cannot be generated: %s", error)
                    self._room.release()
                    await asyncio.sleep(PAUSE_S)
                else:
                    working = group.create_task(self._work(lease))
                    working.add_done_callback(lambda _: self._room.release())

    async def add(self, response: ModelResponse, input: bytes, request: GenerateRequest) -> None:
        """Stores a queued response, for any process to generate."""
        request.request_id = response.id
        logprobs = request.sampling_params.HasField("logprobs")
        tenant = tenants.present.get()
        stored = Stored(encode(response), input, response.previous_response_id, logprobs, tenant=tenant)
        about = request.SerializeToString()
        await self._responses.save(
            response.id, stored, first=lambda connection: self._log.add(connection, response.id, about)
        )
        self._jobs.wake()

    async def cancel(self, id: str) -> Stored:
        """Returns the response after its end, or as it is if that takes too long. Raises ApiError 400, 404."""
        stored = await self._responses.get(id)
        response = response_of(stored)
        if not response.background:
            raise ApiError(400, f"response {id!r} was not created with background: true", param="response_id")
        if has_ended(stored) or not await self._jobs.cancel(id):
            return await self._responses.get(id)
        if (lease := await self._jobs.claim(id)) is not None:  # no process has room for it
            await self._work(lease)
            return await self._responses.get(id)
        give_up = time.monotonic() + CANCEL_TIMEOUT_S
        while not has_ended(stored) and time.monotonic() < give_up:
            await asyncio.sleep(WRITE_S)
            stored = await self._responses.get(id)
        return stored

    async def delete(self, id: str) -> None:
        """Deletes a response of any kind; one that still runs is aborted. Raises ApiError 404."""
        await self._responses.delete(id, first=lambda connection: self._log.remove(connection, id))

    async def events(self, id: str, first_event: int, shutdown: GracefulShutdown) -> AsyncIterator[bytes]:
        """Returns the events from this number on, until the response ends or the gateway shuts down.

        Raises ApiError 400, 404.
        """
        stored = await self._responses.get(id)
        response = response_of(stored)
        if not response.background:
            message = f"response {id!r} has no stored events; create it with background: true"
            raise ApiError(400, message, param="stream")
        if stored.num_outputs and await self._log.find(id) is None:
            raise ApiError(404, f"the events of response {id!r} are no longer kept; retrieve it without stream")
        writer = ResponseWriter(_queued(response), logprobs=stored.logprobs, first_event=first_event)
        return self._events(id, writer, shutdown)

    async def _events(self, id: str, writer: ResponseWriter, shutdown: GracefulShutdown) -> AsyncIterator[bytes]:
        out: list[bytes] = []
        since, model = time.monotonic(), writer.response.model
        writer.stream.out = out
        writer.start()
        number = 0
        while not shutdown.begun:
            tail = await self._log.read(id, number)
            outputs = [] if tail is None else _outputs(tail.values)
            for output in outputs:
                if number == 0:
                    writer.begin()
                writer.add(output)
                number += 1
            if ended := tail is None or tail.ended:
                stored = await self._responses.find(id)
                if stored is not None and has_ended(stored):
                    writer.end_as(response_of(stored))
                else:
                    writer.fail(ApiError(404, f"response {id!r} was deleted"))
            if out:
                yield b"".join(out)
                out.clear()
            if ended:
                return
            if outputs:
                since = time.monotonic()
                continue
            if time.monotonic() - since > COMMENT_S and (reason := self._lines.waits(model)):
                since = time.monotonic()
                yield comment_of(reason)
            await asyncio.sleep(WRITE_S)

    async def _work(self, lease: Lease) -> None:
        try:
            async with self._jobs.hold(lease):
                try:
                    await self._finish(lease)
                except ApiError as error:  # of the store, which may recover
                    logger.error("response %s is interrupted: %s", lease.id, error)
                    await asyncio.sleep(PAUSE_S)
                except LeaseLost:
                    raise
                except Exception:
                    logger.exception("response %s is left to another process", lease.id)
                    await asyncio.sleep(PAUSE_S)  # or to this one
        except LeaseLost:
            logger.warning("response %s was deleted, or another process generates it now", lease.id)

    async def _finish(self, lease: Lease) -> None:
        """Completes a response and stores it. Raises ApiError or LeaseLost."""
        try:
            stored = await self._responses.find_any(lease.id)
            if stored is not None and not has_ended(stored):
                error = await self._outcome(lease, stored)
                tail = await self._log.read(lease.id, 0)
                if tail is None:
                    raise LeaseLost(lease.id)
                ended = _at_end(stored, _outputs(tail.values), error)
                logger.info("response %s %s after %d outputs", lease.id, status_of(ended), len(tail.values))
                await self._responses.update(lease.id, ended, lease)
        except (DecodeError, ProtobufDecodeError):
            logger.exception("response %s is stored in a form that cannot be read; it is given up", lease.id)
        await self._jobs.end(lease)

    async def _outcome(self, lease: Lease, stored: Stored) -> ApiError | None:
        """Generates the missing outputs, unless the response is cancelled. Returns the cause if it failed."""
        if lease.lost_leases >= MAX_LOST_LEASES:
            return ApiError(500, f"{lease.lost_leases} gateway processes died while they generated it")
        generating = asyncio.create_task(self._generate(lease, stored))
        cancelled = asyncio.create_task(lease.cancelled.wait())
        try:
            await asyncio.wait([generating, cancelled], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await rpc.cancel([generating, cancelled])
        return None if generating.cancelled() else generating.result()

    async def _generate(self, lease: Lease, stored: Stored) -> ApiError | None:
        """Generates until there is an output with a finish reason. Returns the cause if the response failed.

        Raises ApiError of the store, or LeaseLost.
        """
        if not (about := await self._log.find(lease.id)):
            return ApiError(500, "its request was lost; send it again")
        request = GenerateRequest.FromString(about)
        while True:
            try:
                await self._attempt(lease, stored, request)
                return None
            except (RpcError, ApiError) as error:
                failure = from_rpc(error) if isinstance(error, RpcError) else error
            if failure.status not in (429, 503):
                return failure
            await asyncio.sleep(max(PAUSE_S, failure.retry_delay or 0.0))

    async def _attempt(self, lease: Lease, stored: Stored, request: GenerateRequest) -> None:
        tail = await self._log.read(lease.id, 0)
        if tail is None:
            raise LeaseLost(lease.id)
        if _last(_outputs(tail.values)) is not None:
            return

        await self._lines.client(request.model)  # raises if there is none

        def start(earlier: Sequence[Sequence[GenerateResponse]]) -> Source:
            context = tenants.attach(stored.tenant, RequestContext())
            return self._lines.generate([request], streaming=True, context=context, earlier=earlier)

        # The job ends only once the response is stored with its end.
        entries = written(self._jobs, lease, tail.values, start, num_choices=1, pace_s=WRITE_S, ends_job=False)
        is_queued = not tail.values
        async with aclosing(entries):
            async for _ in entries:
                if is_queued:
                    await self._responses.update(lease.id, _in_progress(stored), lease)
                    is_queued = False


BACKGROUND = AppState[Background]("background")


def _outputs(values: Sequence[bytes]) -> list[GenerateResponse]:
    return by_choice(values, 1)[0]


def _last(outputs: Sequence[GenerateResponse]) -> GenerateResponse | None:
    """Returns the output with the finish reason, if there is one."""
    return outputs[-1] if outputs and outputs[-1].finish_reason else None


def _queued(response: ModelResponse) -> ModelResponse:
    """Returns the response as it was before it began."""
    response.status, response.output, response.completed_at = "queued", [], None
    response.usage = response.error = response.incomplete_details = None
    return response


def _in_progress(stored: Stored) -> Stored:
    response = response_of(stored)
    response.status = "in_progress"
    return replace(stored, response=encode(response))


def _at_end(stored: Stored, outputs: Sequence[GenerateResponse], error: ApiError | None) -> Stored:
    """Returns the response at its end. Without a last output and without an error it was cancelled."""
    writer = ResponseWriter(response_of(stored), logprobs=stored.logprobs)
    for output in outputs:
        writer.add(output)
    usage = next((response_usage(one.usage) for one in reversed(outputs) if one.usage.prompt_tokens), None)
    if error is not None:
        writer.fail(error)
    elif (last := _last(outputs)) is not None:
        writer.end(last.finish_reason, response_usage(last.usage), time.time())
    else:
        writer.cancel(usage)
    return replace(stored, response=encode(writer.response), num_outputs=len(outputs))
