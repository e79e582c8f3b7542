"""A kept generation, as this process follows it: all of its entries, whichever process writes them."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing, suppress

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.kept.writing import Start, written
from pagewire.gateway.store import Lease, LeaseLost, Leases, Log
from pagewire.wire.rpc import RpcError

logger = logging.getLogger(__name__)

# Seconds between two reads of the entries of another process.
POLL_S = 0.05


class KeptGeneration:
    """Generates while it has followers and no other process does. Without followers, the generation pauses."""

    def __init__(
        self,
        id: str,
        log: Log,
        leases: Leases,
        start: Start,
        num_choices: int,
        pace_s: float,
        on_close: Callable[[], None],
    ) -> None:
        """pace_s: the least time between two entries. on_close: called when no follower can join any more."""
        self.entries: list[bytes] = []
        self.error: Exception | None = None  # ends the generation after these entries
        self.is_closed = False  # there are no more entries
        self.changed = asyncio.Event()  # set once any of these three has changed, and replaced by another event
        self._id = id
        self._log = log
        self._leases = leases
        self._start = start
        self._num_choices = num_choices
        self._pace_s = pace_s
        self._on_close = on_close
        self._followers: set[object] = set()
        self._has_ended = False
        self.task = asyncio.create_task(self._run(), name="kept generation")

    def join(self, follower: object) -> None:
        self._followers.add(follower)

    def leave(self, follower: object) -> None:
        if follower in self._followers:  # leaving twice would interrupt the release of the lease
            self._followers.remove(follower)
            if not self._followers and not self.is_closed:
                self._on_close()
                self.task.cancel()

    def notify(self) -> None:
        """Wakes all followers."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    async def _run(self) -> None:
        try:
            while not self._has_ended:
                is_free = await self._read()
                lease = await self._leases.claim(self._id) if is_free else None
                if lease is not None:
                    with suppress(LeaseLost):  # another process continues
                        await self._generate(lease)
                if not self._has_ended:
                    await asyncio.sleep(POLL_S)
        except (ApiError, RpcError) as error:
            self.error = error
        except Exception:
            logger.exception("a kept generation failed")
            self.error = ApiError(500, "internal error; see the gateway's log")
        finally:
            self.is_closed = True
            self._on_close()
            self.notify()

    async def _read(self) -> bool:
        """Adds the new entries of the log. Returns whether this process may become the owner."""
        tail = await self._log.read(self._id, len(self.entries))
        if tail is None:
            raise _no_room()
        for value in tail.values:
            self._add(value, is_last=False)
        self._has_ended = tail.ended
        return tail.is_free and not tail.ended

    async def _generate(self, lease: Lease) -> None:
        async with self._leases.hold(lease):
            await self._read()  # the entries of the previous owner until its lease was lost
            entries = written(
                self._leases,
                lease,
                self.entries,
                self._start,
                num_choices=self._num_choices,
                pace_s=self._pace_s,
                ends_job=True,
            )
            async with aclosing(entries):
                async for value in entries:
                    self._add(value, is_last=lease.has_ended)

    def _add(self, value: bytes, *, is_last: bool) -> None:
        self._has_ended = is_last
        self.entries.append(value)
        self.notify()


def _no_room() -> ApiError:
    return ApiError(
        503,
        "this generation made room for others in the store; try again without Last-Event-ID, or start the server with "
        "a larger --generation-store-size or --max-stored-generations",
    )
