"""Keeps generations for clients that ask for it, so that any gateway can continue them.

A client asks with the header `Idempotency-Key`, and sends its request again to continue. So the log holds the outputs,
and of the request only its hash, its seed and the head of its answer, which let it continue the same generation.
"""

import asyncio
import hashlib
import json
import secrets
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.reply import Line
from pagewire.gateway.core.request_context import request_context
from pagewire.gateway.generation.lines import LINES
from pagewire.gateway.kept.event_ids import EventIds, parse_event_id
from pagewire.gateway.kept.generation import KeptGeneration
from pagewire.gateway.kept.reply import KeptReply
from pagewire.gateway.kept.writing import Source
from pagewire.gateway.schema.generation import GenerationParameters
from pagewire.gateway.store import Leases, Log
from pagewire.v1.common_pb2 import RequestContext
from pagewire.v1.inference_pb2 import GenerateRequest, GenerateResponse
from pagewire.wire import rpc, tenants
from pagewire.wire.request_seeds import seed_of

MAX_KEY_CHARS = 255
# The least time between two entries of an answer that is not streamed: its client reads only the end.
WHOLE_PACE_S = 0.25
_LARGE_BODY = 256 * 1024  # bytes; sorting such a body takes longer than a turn of the event loop may
# Keys of bodies on which the output does not depend.
_LABELS = ("stream", "stream_options", "user", "metadata", "request_id", "rid", "priority", "background", "store")


class About(msgspec.Struct):
    """The description of a kept generation in the log."""

    fingerprint: str  # of path and body
    tenant: str
    request_id: str
    created: int  # Unix time, seconds
    seed: int  # used if the body has none
    model: str = ""  # the same


class Keeper:
    """The kept generations, as one gateway process sees them."""

    def __init__(self, log: Log, *, keep_all_streams: bool, seed: int | None = None) -> None:
        """seed: that of the server, for requests without one."""
        self._log = log
        self._seed = seed
        self._leases = Leases(log)
        self._followed: dict[str, KeptGeneration] = {}  # by id
        self._running: set[asyncio.Task[None]] = set()  # of generations, also of those without followers
        self._keep_all_streams = keep_all_streams

    async def close(self) -> None:
        await rpc.cancel(list(self._running))
        await self._log.close()

    async def open(self, request: Request, body: GenerationParameters) -> "Kept | None":
        """Returns the generation that a request asks to keep or to continue; None if it does not ask.

        The request gets the id, the time, the seed and the model of the first attempt.

        Raises ApiError: 400, 404 if the generation is gone, 422 if it belongs to another request.
        """
        if body.seed is None and self._seed is not None:
            body.seed = seed_of(self._seed, (await _fingerprint(request, _LABELS)).encode())
        key, last_event = request.headers.get("idempotency-key"), request.headers.get("last-event-id") or None
        if key is None and last_event is None and not (body.stream and self._keep_all_streams):
            return None
        context = request_context(request.scope)
        tenant = _tenant(request.headers)
        id, last = uuid.uuid4().hex if key is None else _id_of(tenant, key), -1
        if last_event is not None:
            id, last = _position(last_event, None if key is None else id)
        fingerprint = await _fingerprint(request)
        seed, model = secrets.randbits(63), await LINES.of(request).name_of(body.model)
        about = About(fingerprint, tenant, context.request_id, context.created, seed, model)
        begun: bytes | None
        if last_event is None:
            begun = await self._log.begin(id, msgspec.msgpack.encode(about))
        else:
            begun = await self._log.find(id)
        first = None if begun is None else msgspec.msgpack.decode(begun, type=About)
        if first is None or first.tenant != tenant:
            message = (
                "the generation of Last-Event-ID is not kept, or no longer kept; send the request without that header"
            )
            raise ApiError(404, message, code="generation_not_found")
        if first.fingerprint != fingerprint:
            message = "Idempotency-Key or Last-Event-ID belongs to another request; send the same request, or a new key"
            raise ApiError(422, message, code="idempotency_key_reused")
        context.request_id, context.created = first.request_id, first.created
        if body.seed is None:
            body.seed = first.seed
        body.model = body.model or first.model or None
        return Kept(self, id, EventIds(id, last), 0.0 if body.stream else WHOLE_PACE_S)

    def reply(
        self, id: str, link: Line, requests: Sequence[GenerateRequest], context: RequestContext, pace_s: float
    ) -> KeptReply:
        """Returns all outputs of a generation, from the first one."""

        def start(earlier: Sequence[Sequence[GenerateResponse]]) -> Source:
            return link.generate(requests, streaming=True, context=context, earlier=earlier)

        if (generation := self._followed.get(id)) is None:
            generation = KeptGeneration(
                id, self._log, self._leases, start, len(requests), pace_s, lambda: self._forget(id, generation)
            )
            self._followed[id] = generation
            self._running.add(generation.task)
            generation.task.add_done_callback(self._running.discard)
        return KeptReply(generation, requests)

    def _forget(self, id: str, generation: KeptGeneration | None) -> None:
        if self._followed.get(id) is generation:
            del self._followed[id]


@dataclass(frozen=True)
class Kept:
    """A kept generation, as one HTTP request asks for it."""

    keeper: Keeper
    id: str
    event_ids: EventIds
    pace_s: float  # the least time between two entries of the log

    def generate(self, link: Line, requests: Sequence[GenerateRequest], context: RequestContext) -> KeptReply:
        """Starts or continues the generation. requests: made of the same body as those of any earlier attempt."""
        return self.keeper.reply(self.id, link, requests, context, self.pace_s)


def _tenant(headers: Headers) -> str:
    """Returns the scope of keys and ids: the tenant, as its API key may change, or without a tenant the API key."""
    scope = tenants.present.get().name or headers.get("authorization", "") + "\n" + headers.get("x-api-key", "")
    return hashlib.sha256(scope.encode()).hexdigest()[:16]


def _id_of(tenant: str, key: str) -> str:
    if not 0 < len(key) <= MAX_KEY_CHARS:
        raise ApiError(400, f"Idempotency-Key has {len(key)} characters; send 1 to {MAX_KEY_CHARS}")
    return hashlib.sha256(f"{tenant}\n{key}".encode()).hexdigest()[:32]


def _position(last_event: str, id: str | None) -> tuple[str, int]:
    """Returns a generation and the number of an event in it. id: the generation, if the key names it."""
    position = parse_event_id(last_event)
    if position is None:
        raise ApiError(400, f"Last-Event-ID {last_event!r} is not an id of this server's events")
    if id is not None and position[0] != id:
        raise ApiError(400, "Last-Event-ID and Idempotency-Key name two generations; send only one of them")
    return position


async def _fingerprint(request: Request, left_out: Collection[str] = ()) -> str:
    """Returns a hash of path and body, the same for the same JSON in other bytes unless it is large.

    left_out: keys of the body that do not count, unless it is large.
    """
    if len(raw := await request.body()) > _LARGE_BODY:
        return hashlib.sha256(f"{request.url.path}\n".encode() + raw).hexdigest()
    content = {key: value for key, value in (await request.json()).items() if key not in left_out}
    body = json.dumps(content, sort_keys=True)
    return hashlib.sha256(f"{request.url.path}\n{body}".encode(errors="surrogatepass")).hexdigest()
