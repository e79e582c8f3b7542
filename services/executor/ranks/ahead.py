"""Sends a step to the other stages of a pipeline when it arrives, long before the leader, the last stage, computes it.

An item in the queue of the leader's device thread is certain to run, unless it is behind a call between steps: such
items are sent when their turn comes. All others are sent in the order of the queue, so all ranks do the same.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from pagewire.services.executor.parallel.group import RankLost
from pagewire.services.executor.ranks.leader import Leader
from pagewire.services.executor.ranks.step_message import step_to_proto
from pagewire.services.executor.service.session import Session
from pagewire.services.executor.service.work import Called, Closed, Item, Opened, Submitted
from pagewire.v1.rank_link_pb2 import RankCommand


class Ahead:
    """The `work.WorkObserver` of a leader with several stages."""

    is_strict = True

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._lock = threading.Lock()
        self._session: Session | None = None  # the latest one with steps that the followers have received
        self._behind: set[int] = set()  # ids of items that are sent when their turn comes

    def arrived(self, item: Item, put: Callable[[Item], None]) -> None:
        with self._lock:
            if self._behind or isinstance(item, Called):
                self._behind.add(id(item))
            else:
                self._send(item)
            put(item)

    def begins(self, item: Item) -> None:
        with self._lock:
            if id(item) in self._behind:
                self._send(item)

    def ended(self, item: Item) -> None:
        with self._lock:
            self._behind.discard(id(item))

    def _send(self, item: Item) -> None:
        with contextlib.suppress(RankLost):  # the device thread notices
            if isinstance(item, Opened):
                self._session = item.session
                self._leader.send(RankCommand(reset=True))
            elif isinstance(item, Submitted) and item.session is self._session:
                self._leader.send(RankCommand(step=step_to_proto(item.step)))
            elif isinstance(item, Closed) and item.session is self._session:
                self._session = None
                self._leader.send(RankCommand(reset=True))
            elif isinstance(item, Called):
                self._session = None
