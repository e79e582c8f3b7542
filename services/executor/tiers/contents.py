"""The blocks that a tier holds, and calls that follow how these change."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

# A block: the index of its group, and the hash of what it holds.
Key = tuple[int, bytes]

HASH_BYTES = 32


class Changes(NamedTuple):
    """Changes since a call last asked, to be applied in this order."""

    cleared: bool  # the tier was emptied
    removed: list[Key]
    stored: list[Key]


class Following:
    """One call that follows a tier. Its own memory is bounded by the number of blocks: later changes replace earlier
    ones."""

    def __init__(self, held: Iterable[Key], wake: Callable[[], None]) -> None:
        self._pending: dict[Key, bool] = dict.fromkeys(held, True)
        self._cleared = False
        self._wake = wake

    def note(self, key: Key, is_stored: bool) -> None:
        was_empty = not self._pending and not self._cleared
        self._pending[key] = is_stored
        if was_empty:
            self._wake()

    def note_cleared(self) -> None:
        self._pending.clear()
        self._cleared = True
        self._wake()

    def take(self) -> Changes:
        pending, cleared = self._pending, self._cleared
        self._pending, self._cleared = {}, False
        removed = [key for key, is_stored in pending.items() if not is_stored]
        return Changes(cleared, removed, [key for key, is_stored in pending.items() if is_stored])


class Contents:
    """The blocks of one tier. Used on all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: set[Key] = set()
        self._following: list[Following] = []

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def add(self, key: Key) -> None:
        with self._lock:
            if key not in self._held:
                self._held.add(key)
                for one in self._following:
                    one.note(key, True)

    def remove(self, key: Key) -> None:
        with self._lock:
            if key in self._held:
                self._held.remove(key)
                for one in self._following:
                    one.note(key, False)

    def clear(self) -> None:
        with self._lock:
            if self._held:
                self._held.clear()
                for one in self._following:
                    one.note_cleared()

    def follow(self, wake: Callable[[], None]) -> Following:
        """Begins to follow the tier: what it holds now counts as changes. wake: called on any thread when there are
        changes to take, after none."""
        with self._lock:
            following = Following(self._held, wake)
            self._following.append(following)
            return following

    def take(self, following: Following) -> Changes:
        with self._lock:
            return following.take()

    def leave(self, following: Following) -> None:
        with self._lock:
            self._following.remove(following)
