"""Keeps generations whose clients ask for it, so that they can be taken up again at any gateway.

A client asks with the header `Idempotency-Key`. Its request is not kept: it comes again with it. Kept are its hash, the
seed and the head of the answer, with which the same request means the same generation, and what has been said so far.
"""

import asyncio
import hashlib
import json
import logging
import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request

from pagewire.errors import StartupError
from pagewire.gateway.core.app_state import AppState
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.reply import Line
from pagewire.gateway.core.request_context import request_context
from pagewire.gateway.kept.drive import WHOLE_PACE_S, Drive, Source
from pagewire.gateway.kept.event_ids import EventIds, parse_event_id
from pagewire.gateway.kept.group_commit import GroupCommit
from pagewire.gateway.kept.log import LEASE_S, Bounds, Log
from pagewire.gateway.kept.reply import KeptReply
from pagewire.gateway.kept.sqlite_log import SqliteLog
from pagewire.gateway.schema.generation import GenerationParameters
from pagewire.v1.common_pb2 import RequestContext
from pagewire.v1.inference_pb2 import GenerateRequest, GenerateResponse
from pagewire.wire import tenants

logger = logging.getLogger(__name__)

MAX_KEY_CHARS = 255


class About(msgspec.Struct):
    """What is kept of a request."""

    fingerprint: str  # of path and body
    tenant: str
    request_id: str
    created: int  # Unix time, seconds
    seed: int  # if the body gives none


class Keeper:
    """The kept generations, as one gateway process sees them."""

    def __init__(self, log: Log, *, keep_all_streams: bool, lease_s: float = LEASE_S) -> None:
        self.log = log
        self.drives: dict[str, Drive] = {}  # what this process goes on with
        self._commit = GroupCommit(log)
        self._keep_all_streams = keep_all_streams
        self._lease_s = lease_s

    async def run(self) -> None:
        """Renews leases until cancelled."""
        while True:
            await asyncio.sleep(self._lease_s / 4)
            if leases := [(id, drive.owner) for id, drive in self.drives.items()]:
                try:
                    await self.log.renew(leases)
                except ApiError as error:
                    logger.error("kept generations may go to another process: %s", error.message)

    async def close(self) -> None:
        drives = list(self.drives.values())
        for drive in drives:
            drive.stop()
        for drive in drives:
            await drive.closed.wait()
        await self.log.close()

    async def open(self, request: Request, body: GenerationParameters) -> "Kept | None":
        """The generation that a request asks to be kept, new or begun before; None if it does not ask.

        The request gets the id and the time of the first attempt, with which an answer begins, and its seed.

        Raises ApiError: 400, 404 if it is gone, 422 if it was another request's.
        """
        key, last_event = request.headers.get("idempotency-key"), request.headers.get("last-event-id") or None
        if key is None and last_event is None and not (body.stream and self._keep_all_streams):
            return None
        context = request_context(request.scope)
        tenant = _tenant(request.headers)
        id, last = uuid.uuid4().hex if key is None else _id_of(tenant, key), -1
        if last_event is not None:
            id, last = _place(last_event, None if key is None else id)
        fingerprint = await _fingerprint(request)
        about = About(fingerprint, tenant, context.request_id, context.created, secrets.randbits(63))
        begun: bytes | None
        if last_event is None:
            begun = await self.log.begin(id, msgspec.msgpack.encode(about))
        else:
            begun = await self.log.find(id)
        first = None if begun is None else msgspec.msgpack.decode(begun, type=About)
        if first is None or first.tenant != tenant:
            message = "the generation of Last-Event-ID is not kept (any more): send the request without that header"
            raise ApiError(404, message, code="generation_not_found")
        if first.fingerprint != fingerprint:
            message = "another request had this Idempotency-Key or Last-Event-ID: send the same request, or a new key"
            raise ApiError(422, message, code="idempotency_key_reused")
        context.request_id, context.created = first.request_id, first.created
        if body.seed is None:
            body.seed = first.seed
        return Kept(self, id, EventIds(id, last), 0.0 if body.stream else WHOLE_PACE_S)

    def drive(
        self, id: str, link: Line, requests: Sequence[GenerateRequest], context: RequestContext, pace_s: float
    ) -> Drive:
        """Goes on with a generation in this process, if no other has it."""

        def start(earlier: Sequence[Sequence[GenerateResponse]]) -> Source:
            return link.generate(requests, streaming=True, context=context, earlier=earlier)

        drive = self.drives[id] = Drive(id, self.log, self._commit, start, len(requests), pace_s)
        drive.on_close = lambda: self.drives.pop(id, None)
        return drive


KEEPER = AppState[Keeper]("keeper")


@dataclass(frozen=True)
class Kept:
    """A kept generation, as one HTTP request asks for it."""

    keeper: Keeper
    id: str
    event_ids: EventIds
    pace_s: float  # seconds between two entries of the log, at least

    def generate(self, link: Line, requests: Sequence[GenerateRequest], context: RequestContext) -> KeptReply:
        """requests: made of the same body as those of any attempt before."""

        def drive() -> Drive:
            return self.keeper.drive(self.id, link, requests, context, self.pace_s)

        return KeptReply(self.keeper, self.id, requests, drive)


def open_log(store: str, directory: Path, bounds: Bounds) -> Log:
    """store: --generation-store. Raises StartupError."""
    if store.startswith(("redis://", "rediss://", "unix://")):
        return _redis_log(store, bounds)
    if store not in ("disk", "memory"):
        raise StartupError(f"--generation-store {store}: give disk, memory or a URL as redis://HOST:PORT")
    return SqliteLog(Path(":memory:") if store == "memory" else directory / "generations.db", bounds)


def _redis_log(url: str, bounds: Bounds) -> Log:
    try:
        from pagewire.gateway.kept.redis_log import RedisLog
    except ModuleNotFoundError as error:
        raise StartupError("--generation-store redis://…: run `pip install 'pagewire[redis]'`") from error
    try:
        return RedisLog(url, bounds)
    except ValueError as error:
        raise StartupError(f"--generation-store is no URL of Redis: {error}") from error


def _tenant(headers: Headers) -> str:
    """Who sends a request: keys and ids of one are nothing to another. A tenant may come with a new key."""
    given = tenants.present.get().name or headers.get("authorization", "") + "\n" + headers.get("x-api-key", "")
    return hashlib.sha256(given.encode()).hexdigest()[:16]


def _id_of(tenant: str, key: str) -> str:
    if not 0 < len(key) <= MAX_KEY_CHARS:
        raise ApiError(400, f"Idempotency-Key has {len(key)} characters; 1 to {MAX_KEY_CHARS} are possible")
    return hashlib.sha256(f"{tenant}\n{key}".encode()).hexdigest()[:32]


def _place(last_event: str, id: str | None) -> tuple[str, int]:
    """id: of the generation, if that is known."""
    place = parse_event_id(last_event)
    if place is None:
        raise ApiError(400, f"Last-Event-ID {last_event!r} is no id of this server's events")
    if id is not None and place[0] != id:
        raise ApiError(400, "Last-Event-ID and Idempotency-Key are of two generations: send the one that is meant")
    return place


async def _fingerprint(request: Request) -> str:
    """Of what is asked for; the same for the same JSON in other bytes."""
    body = json.dumps(await request.json(), sort_keys=True)
    return hashlib.sha256(f"{request.url.path}\n{body}".encode(errors="surrogatepass")).hexdigest()
