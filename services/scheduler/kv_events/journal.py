"""The latest messages of a scheduler, by number."""

import asyncio
import time
from collections import deque

from pagewire.v1.admin_pb2 import SubscribeKvEventsResponse

MAX_BYTES = 64 * 1024 * 1024
MAX_MESSAGES = 100_000


class Journal:
    """Keeps messages until there are too many. Whoever reads them keeps only the number of the last one that was read,
    so a slow reader takes no memory, and notices when it is too late."""

    def __init__(self, max_bytes: int = MAX_BYTES, max_messages: int = MAX_MESSAGES) -> None:
        self.source = time.time_ns()  # higher for a scheduler that starts later
        self.last = 0  # the number of the latest message
        self._messages: deque[tuple[SubscribeKvEventsResponse, int]] = deque()  # with sizes in bytes
        self._max_bytes, self._max_messages = max_bytes, max_messages
        self._num_bytes = 0
        self._changed = asyncio.Event()

    def append(self, message: SubscribeKvEventsResponse) -> None:
        """Numbers a message and keeps it."""
        self.last += 1
        message.source, message.number = self.source, self.last
        self._messages.append((message, num_bytes := message.ByteSize()))
        self._num_bytes += num_bytes
        while len(self._messages) > self._max_messages or (
            self._num_bytes > self._max_bytes and len(self._messages) > 1
        ):
            self._num_bytes -= self._messages.popleft()[1]
        self._changed.set()
        self._changed = asyncio.Event()

    def follows(self, number: int) -> bool:
        """Returns whether every message after this number is here, or to come."""
        return self.last - len(self._messages) <= number <= self.last

    def get(self, number: int) -> SubscribeKvEventsResponse:
        """Returns a message that is here."""
        return self._messages[number - self.last - 1][0]

    async def wait(self) -> None:
        """Returns after the next message."""
        await self._changed.wait()
