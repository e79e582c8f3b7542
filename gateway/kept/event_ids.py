"""Ids of server-sent events: the generation, and the number of the event in it."""

import re
from collections.abc import Iterable

_ID = re.compile(r"([0-9a-f]{32})-([0-9]{1,9})")


class EventIds:
    """Adds ids to the events of one response, and leaves out those that its client has."""

    def __init__(self, generation: str, last: int = -1) -> None:
        """last: the number of the last event that the client has."""
        self._prefix = f"id: {generation}-".encode()
        self._last = last
        self._number = 0

    def added(self, pieces: Iterable[bytes]) -> list[bytes]:
        """Returns the events with ids. pieces: parts of whole events; each event ends with its only empty line."""
        events = []
        for event in b"".join(pieces).split(b"\n\n")[:-1]:
            if self._number > self._last:
                events.append(b"%b%d\n%b\n\n" % (self._prefix, self._number, event))
            self._number += 1
        return events


def parse_event_id(id: str) -> tuple[str, int] | None:
    """Returns (generation, number); None if `id` is not the id of an event."""
    match = _ID.fullmatch(id)
    return match and (match[1], int(match[2]))
