"""A request that is composed of others, and the ids by which requests are ended."""

import asyncio
from collections.abc import Collection
from typing import Any


class ComposedGeneration:
    """One that the present task composes of others."""

    def __init__(self, request_id: str, tenant: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task: asyncio.Task[Any] = task
        self.request_id = request_id
        self.tenant = tenant
        self.is_over = False
        self.was_ended = False

    def end_early(self) -> bool:
        """Cancels the task: there is nothing yet that its client could be told. False: it has ended before."""
        if self.is_over or self.was_ended:
            return False
        self.was_ended = True
        self.task.cancel()
        return True

    def goes_by(self, request_ids: Collection[str]) -> bool:
        return goes_by(self.request_id, request_ids)


def goes_by(request_id: str, request_ids: Collection[str]) -> bool:
    """Whether an id is among these, or is that of a choice of a request whose id is. Without an id it never is."""
    whole, _, choice = request_id.rpartition("-")
    return bool(request_id) and (request_id in request_ids or (choice.isdecimal() and whole in request_ids))
