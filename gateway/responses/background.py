"""Responses in the background: any gateway process of the host generates them, and any tells of them.

A process that dies leaves the outputs so far in the store; whoever takes the job goes on after them, as after the death
of a service.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator

from google.protobuf.message import DecodeError as ProtobufDecodeError
from msgspec import DecodeError
from msgspec.structs import replace

from pagewire.gateway.core.app_state import AppState
from pagewire.gateway.core.encoding import encode
from pagewire.gateway.core.errors import ApiError, from_rpc
from pagewire.gateway.core.middleware import GracefulShutdown
from pagewire.gateway.core.reply import ChoiceOutput, Reply
from pagewire.gateway.core.tokenizer_link import TokenizerLink
from pagewire.gateway.responses.answer import response_usage
from pagewire.gateway.responses.bodies.responses import ModelResponse
from pagewire.gateway.responses.output_log import OutputLog, end_of
from pagewire.gateway.responses.stored import Responses, Stored, has_ended, response_of, status_of
from pagewire.gateway.responses.writer import ResponseWriter
from pagewire.gateway.store import Lease, LeaseLost, Store
from pagewire.v1.common_pb2 import RequestContext
from pagewire.v1.inference_pb2 import GenerateRequest, GenerateResponse
from pagewire.wire import rpc, tenants
from pagewire.wire.rpc import RpcError

logger = logging.getLogger(__name__)

# That one process generates at once.
MAX_RUNNING = 256
# Between two writes of one response's outputs, and between two looks of those who tell of them.
WRITE_S = 0.1
# After a refusal that passes: too many requests, or no engine.
PAUSE_S = 1.0
# Gateway processes that may die under a response before it is given up: it may be what they die of.
MAX_LOST_LEASES = 3
CANCEL_TIMEOUT_S = 5.0


class Interrupted(Exception):
    """The response was cancelled, or another process has it."""


class Background:
    """What one gateway process does for responses in the background, whoever has created them."""

    def __init__(self, link: TokenizerLink, store: Store, responses: Responses, log: OutputLog) -> None:
        self._link = link
        self._responses = responses
        self._log = log
        self._jobs = store.jobs("response")
        self._room = asyncio.Semaphore(MAX_RUNNING)

    async def run(self) -> None:
        """Until it is cancelled; what runs then is left to another process, or the next."""
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

    # What clients ask for.

    async def add(self, response: ModelResponse, input: bytes, request: GenerateRequest) -> None:
        """Stores a response that is queued, for any process to generate."""
        request.request_id = response.id
        logprobs = request.sampling_params.HasField("logprobs")
        tenant = tenants.present.get()
        stored = Stored(encode(response), input, response.previous_response_id, logprobs, tenant=tenant)
        await self._log.put_request(response.id, request)
        await self._responses.save(response.id, stored, self._jobs)

    async def cancel(self, id: str) -> Stored:
        """The response after its end, or as it is if that takes too long. Raises ApiError 400, 404."""
        stored = await self._responses.get(id)
        response = response_of(stored)
        if not response.background:
            raise ApiError(400, f"response {id!r} was not created with background: true", param="response_id")
        if has_ended(stored) or not await self._jobs.cancel(id):
            return await self._responses.get(id)
        if (lease := await self._jobs.take(id)) is not None:  # nobody has room for it
            lease.cancelled.set()
            await self._work(lease)
            return await self._responses.get(id)
        give_up = time.monotonic() + CANCEL_TIMEOUT_S
        while not has_ended(stored) and time.monotonic() < give_up:
            await asyncio.sleep(WRITE_S)
            stored = await self._responses.get(id)
        return stored

    async def delete(self, id: str) -> None:
        """A response of any kind, which ends if it still runs. Raises ApiError 404."""
        await self._responses.delete(id)
        await self._jobs.cancel(id)
        await self._log.delete(id)

    async def events(self, id: str, first_event: int, shutdown: GracefulShutdown) -> AsyncIterator[bytes]:
        """From this number on, to the end of the response, unless the gateway shuts down. Raises ApiError 400, 404."""
        stored = await self._responses.get(id)
        response = response_of(stored)
        if not response.background:
            message = f"the events of response {id!r} are not kept, as it was not created with background: true"
            raise ApiError(400, message, param="stream")
        if stored.num_outputs and await self._log.read(id, 0) is None:
            raise ApiError(404, f"the events of response {id!r} have made room for others; retrieve it whole")
        writer = ResponseWriter(_queued(response), logprobs=stored.logprobs, first_event=first_event)
        return self._events(id, writer, shutdown)

    async def _events(self, id: str, writer: ResponseWriter, shutdown: GracefulShutdown) -> AsyncIterator[bytes]:
        out: list[bytes] = []
        writer.stream.out = out
        writer.start()
        number = 0
        while not shutdown.begun:
            output, ended = await self._log.read(id, number), False
            if output is None:
                stored = await self._responses.find(id)
                ended = stored is None or has_ended(stored)
                output = await self._log.read(id, number) if ended else None  # said just before the end
            if output is not None:
                if number == 0:
                    writer.begin()
                writer.add(output)
                number += 1
            elif ended:
                if stored is not None:
                    writer.end_as(response_of(stored))
                else:
                    writer.fail(ApiError(404, f"response {id!r} was deleted"))
            if out:
                yield b"".join(out)
                out.clear()
            if output is None:
                if ended:
                    return
                await asyncio.sleep(WRITE_S)

    # What is done for them.

    async def _work(self, lease: Lease) -> None:
        async with self._jobs.hold(lease):
            try:
                await self._finish(lease)
            except ApiError as error:  # of the store; it may get better
                logger.error("response %s is interrupted: %s", lease.id, error)
                await asyncio.sleep(PAUSE_S)
            except LeaseLost:
                logger.warning("response %s has gone to another process", lease.id)
            except Exception:
                logger.exception("response %s is left to another process", lease.id)
                await asyncio.sleep(PAUSE_S)  # or to this one

    async def _finish(self, lease: Lease) -> None:
        """Brings a response to its end, and says there what it was. Raises ApiError or LeaseLost."""
        try:
            stored = await self._responses.find_any(lease.id)
            if stored is not None and not has_ended(stored):
                outputs = await self._log.read_all(lease.id)
                error = await self._outcome(lease, stored, outputs)
                ended = _told(stored, outputs, error)
                await self._responses.update(lease.id, ended, lease)
                logger.info("response %s %s after %d outputs", lease.id, status_of(ended), len(outputs))
            if await self._responses.find_any(lease.id) is None:  # it was deleted, perhaps before its last outputs
                await self._log.delete(lease.id)
        except (DecodeError, ProtobufDecodeError):
            logger.exception("response %s is stored in a form that cannot be read; it is given up", lease.id)
        await self._log.delete_request(lease.id)
        await self._jobs.finish(lease)

    async def _outcome(self, lease: Lease, stored: Stored, outputs: list[GenerateResponse]) -> ApiError | None:
        """Generates what is missing; why it failed, if it did. Raises LeaseLost."""
        if lease.lost_leases >= MAX_LOST_LEASES:
            return ApiError(500, f"{lease.lost_leases} gateway processes died while they generated it")
        try:
            await self._generate(lease, stored, outputs)
        except Interrupted:
            if not lease.cancelled.is_set():
                raise LeaseLost(lease.id) from None
        except ApiError as error:
            return error
        return None

    async def _generate(self, lease: Lease, stored: Stored, outputs: list[GenerateResponse]) -> None:
        """Adds to outputs until there is one with a finish reason. Raises ApiError, Interrupted or LeaseLost."""
        if end_of(outputs) is not None:
            return
        if (request := await self._log.request(lease.id)) is None:
            raise ApiError(507, "its request has made room for others before it began: see --response-store-size")
        while end_of(outputs) is None:
            if lease.cancelled.is_set():
                raise Interrupted
            try:
                await self._attempt(lease, stored, request, outputs)
            except (RpcError, ApiError) as error:
                failure = from_rpc(error) if isinstance(error, RpcError) else error
                if failure.status not in (429, 503):
                    raise failure from error
                if await _is_interrupted(lease, max(PAUSE_S, failure.retry_delay or 0.0)):
                    raise Interrupted from error

    async def _attempt(
        self, lease: Lease, stored: Stored, request: GenerateRequest, outputs: list[GenerateResponse]
    ) -> None:
        context = tenants.tell(stored.tenant, RequestContext())
        reply = self._link.generate([request], streaming=True, context=context, earlier=[outputs])
        watching = asyncio.create_task(_watch(lease, reply))
        try:
            while merged := await reply.next():
                output = _as_message(merged[0][1])
                output.usage.CopyFrom(reply.choices[0].usage)
                if not outputs:
                    output.prompt_token_ids[:] = reply.choices[0].prompt_token_ids
                    output.weights_version = reply.choices[0].weights_version
                    await self._responses.update(lease.id, _begun(stored), lease)
                await self._log.append(lease.id, len(outputs), output, lease)
                outputs.append(output)
                if not output.finish_reason:
                    await asyncio.sleep(WRITE_S)  # what comes meanwhile is one output
        finally:
            await rpc.cancel([watching])
            reply.abort()


BACKGROUND = AppState[Background]("background")


async def _watch(lease: Lease, reply: Reply) -> None:
    await _is_interrupted(lease, None)
    reply.fail(Interrupted())


async def _is_interrupted(lease: Lease, timeout: float | None) -> bool:
    """Waits so many seconds for it."""
    waiting = [asyncio.create_task(event.wait()) for event in (lease.cancelled, lease.lost)]
    try:
        done, _ = await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await rpc.cancel(waiting)
    return bool(done)


def _as_message(output: ChoiceOutput) -> GenerateResponse:
    if isinstance(output, GenerateResponse):
        return output
    return GenerateResponse(text=output.text, token_ids=output.token_ids)


def _queued(response: ModelResponse) -> ModelResponse:
    """As it was before anything was generated."""
    response.status, response.output, response.completed_at = "queued", [], None
    response.usage = response.error = response.incomplete_details = None
    return response


def _begun(stored: Stored) -> Stored:
    response = response_of(stored)
    response.status = "in_progress"
    return replace(stored, response=encode(response))


def _told(stored: Stored, outputs: list[GenerateResponse], error: ApiError | None) -> Stored:
    """The response at its end; without one and without an error it was cancelled."""
    response = response_of(stored)
    writer = ResponseWriter(response, logprobs=stored.logprobs)
    for output in outputs:
        writer.add(output)
    usage = next((response_usage(one.usage) for one in reversed(outputs) if one.usage.prompt_tokens), None)
    if error is not None:
        writer.fail(error)
    elif (last := end_of(outputs)) is not None:
        writer.end(last.finish_reason, response_usage(last.usage), time.time())
    else:
        writer.cancel(usage)
    return _ended(stored, writer.response, len(outputs))


def _ended(stored: Stored, response: ModelResponse, num_outputs: int) -> Stored:
    return replace(stored, response=encode(response), num_outputs=num_outputs)
