"""Resets of all prefixes, by their times: tiers keep the latest one that they have followed, in a directory for good.

So an executor that was away learns of a reset when it is back, also from a scheduler that started since: other
executors have told it.
"""

import time
from collections.abc import Set


class Resets:
    """The latest reset, and the latest that each executor has followed."""

    def __init__(self) -> None:
        self.latest = 0  # Unix time, nanoseconds; 0: there was none
        self._followed: dict[int, int] = {}  # by replica id

    @property
    def known(self) -> Set[int]:
        """The ids of executors with tiers."""
        return self._followed.keys()

    def begin(self) -> None:
        """Takes in that there is another one, now."""
        self.latest = max(time.time_ns(), self.latest + 1)

    def on_executor(self, replica_id: int, reset_at: int) -> bool:
        """Takes in what a new executor has followed; returns whether that is later than what was known."""
        self._followed[replica_id] = reset_at
        is_news, self.latest = reset_at > self.latest, max(reset_at, self.latest)
        return is_news

    def on_followed(self, replica_id: int, reset_at: int) -> None:
        """Takes in that an executor has followed a reset."""
        self._followed[replica_id] = max(reset_at, self._followed.get(replica_id, 0))

    def has_missed(self, replica_id: int) -> bool:
        """Returns whether an executor may hold what the latest reset was to remove."""
        return self._followed.get(replica_id, 0) < self.latest
