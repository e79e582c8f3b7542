"""A kept generation that this process owns: its outputs go into the log first, and then to its followers."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.kept.writing import Start, written
from pagewire.gateway.store import Lease, LeaseLost, Leases, Log
from pagewire.wire.rpc import RpcError

logger = logging.getLogger(__name__)


class Drive:
    """Generates while it has followers. Without any, the generation rests until a client asks for it again."""

    def __init__(
        self,
        id: str,
        log: Log,
        leases: Leases,
        start: Start,
        num_choices: int,
        pace_s: float,
        on_close: Callable[[], object],
    ) -> None:
        """pace_s: the least time between two entries."""
        self.has_ended = False  # the generation has its last entry
        self.is_stopping = False
        self.closed = asyncio.Event()
        self._id = id
        self._log = log
        self._leases = leases
        self._start = start
        self._num_choices = num_choices
        self._pace_s = pace_s
        self._on_close = on_close
        self._followers: set[object] = set()
        self._entries: list[bytes] = []
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="kept generation")

    def join(self, follower: object) -> None:
        self._followers.add(follower)

    def leave(self, follower: object) -> None:
        self._followers.discard(follower)
        if not self._followers:
            self.stop()

    def stop(self) -> None:
        self.is_stopping = True
        self._task.cancel()

    async def entry(self, number: int) -> bytes | None:
        """Waits for an entry; None if the generation ends before it, or another process owns the generation now.

        Raises RpcError or ApiError if the generation failed at that entry.
        """
        while number >= len(self._entries) and not self.closed.is_set():
            await self._changed.wait()
        if number < len(self._entries):
            return self._entries[number]
        if self._error is not None:
            raise self._error
        return None

    async def _run(self) -> None:
        try:
            if (lease := await self._leases.claim(self._id)) is not None:
                async with self._leases.hold(lease):
                    await self._generate(lease)
        except LeaseLost:
            pass  # followers read on in the log
        except (ApiError, RpcError) as error:
            self._error = error
        except Exception:
            logger.exception("a kept generation failed")
            self._error = ApiError(500, "internal error; the gateway's log has the cause")
        finally:
            self._on_close()
            self.closed.set()
            self._notify()

    async def _generate(self, lease: Lease) -> None:
        tail = await self._log.read(self._id, 0)
        if tail is None:
            return
        for value in tail.values:
            self._add(value)
        entries = written(
            self._leases,
            lease,
            tail.values,
            self._start,
            num_choices=self._num_choices,
            pace_s=self._pace_s,
            ends_job=True,
        )
        async with aclosing(entries):
            async for value in entries:
                self.has_ended = lease.has_ended
                self._add(value)

    def _add(self, value: bytes) -> None:
        self._entries.append(value)
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
