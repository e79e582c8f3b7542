"""Ids of server-sent events: which generation, and the event's number in it."""

import re
from collections.abc import Iterable

_ID = re.compile(r"([0-9a-f]{32})-([0-9]{1,9})")


class EventIds:
    """Gives the events of one response their ids, and leaves out those that its client has."""

    def __init__(self, generation: str, last: int = -1) -> None:
        """last: number of the last event that the client has."""
        self._prefix = f"id: {generation}-".encode()
        self._last = last
        self._number = 0

    def added(self, pieces: Iterable[bytes]) -> list[bytes]:
        """pieces: of whole events. Their JSON holds no line break, so each ends with the first empty line."""
        events = []
        for event in b"".join(pieces).split(b"\n\n")[:-1]:
            if self._number > self._last:
                events.append(b"%b%d\n%b\n\n" % (self._prefix, self._number, event))
            self._number += 1
        return events


def parse_event_id(id: str) -> tuple[str, int] | None:
    """(generation, number); None if it is no such id."""
    match = _ID.fullmatch(id)
    return match and (match[1], int(match[2]))
