"""The generations that have not ended: a shutdown waits for them, and calls end them by their ids."""

import asyncio
from collections.abc import Collection
from typing import Any, Protocol
from weakref import WeakSet

from pagewire.services.tokenizer.scheduler_link import SchedulerLink


class Endable(Protocol):
    """A generation that can be ended early."""

    request_id: str
    tenant: str

    def end_early(self) -> bool:
        """Ends it; its client receives the output until then. Returns False if it had already ended."""


class LiveGenerations:
    """All generations of this service: those being prepared here, and those at the scheduler."""

    def __init__(self, link: SchedulerLink) -> None:
        self._link = link
        self._preparing: set[asyncio.Future[Any]] = set()
        # All live generations, and some that have ended.
        self._generations: WeakSet[Endable] = WeakSet()

    def add(self, generation: Endable, preparing: asyncio.Future[Any]) -> None:
        """Adds a generation. preparing: is done when the scheduler has all of its requests, or no more will follow."""
        self._generations.add(generation)
        self._preparing.add(preparing)
        preparing.add_done_callback(self._preparing.discard)

    @property
    def num_preparing(self) -> int:
        """The number of generations that the scheduler does not know yet."""
        return len(self._preparing)

    @property
    def num_live(self) -> int:
        """The number of generations being prepared and of requests at the scheduler."""
        return len(self._preparing) + self._link.num_live

    async def drained(self) -> None:
        """Returns when no prompt is being prepared and no request is live at the scheduler."""
        while self.num_live:
            if self._preparing:
                await asyncio.wait(self._preparing)
            await self._link.drained()

    def end_early(self, request_ids: Collection[str] | None, tenant: str | None = None) -> int:
        """Ends generations by their ids (None: all) that belong to the tenant (None: any). Returns how many."""
        chosen = [
            one
            for one in self._generations
            if tenant in (None, one.tenant) and (request_ids is None or _has_id(one, request_ids))
        ]
        return sum([one.end_early() for one in chosen])


def _has_id(generation: Endable, request_ids: Collection[str]) -> bool:
    """Whether the generation has one of these ids, or is a choice `ID-NUMBER` of one. An id "" never matches."""
    whole, _, choice = generation.request_id.rpartition("-")
    return bool(generation.request_id) and (
        generation.request_id in request_ids or (choice.isdecimal() and whole in request_ids)
    )
