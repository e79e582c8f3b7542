"""What one HTTP response takes of a kept generation: what a `Reply` is to others, but told from the log's entries.

So every response to it, the first and any later one, of this gateway or another, says the same in the same events.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.reply import ChoiceOutputs, PendingChoice, Reply, merged_by_choice
from pagewire.gateway.kept.drive import Drive
from pagewire.gateway.kept.entries import decode_entry
from pagewire.gateway.kept.log import Log
from pagewire.v1.inference_pb2 import GenerateRequest

# Between two looks at what another process writes.
POLL_S = 0.05


class Drives(Protocol):
    """The part of a `Keeper` that a response uses."""

    log: Log
    drives: dict[str, Drive]


class KeptReply:
    def __init__(
        self, keeper: Drives, id: str, requests: Sequence[GenerateRequest], drive: Callable[[], Drive]
    ) -> None:
        """drive: goes on with the generation in this process."""
        self.choices = Reply(_nothing, requests, streaming=False).choices
        self._keeper = keeper
        self._id = id
        self._start_drive = drive
        self._number = 0  # of the entry that comes next
        self._unread: deque[bytes] = deque()  # that one and later ones
        self._drive: Drive | None = None  # that it follows
        self._waiting: asyncio.Task[bytes | None] | None = None
        self._error: BaseException | None = None

    async def next(self) -> ChoiceOutputs:
        """The next entry's outputs; empty at the end. Raises RpcError, ApiError, or whatever fail() was given."""
        if self._error is None:
            self._waiting = asyncio.create_task(self._entry())
            try:
                value = await self._waiting
            except asyncio.CancelledError:
                if self._error is None:
                    raise
        if self._error is not None:
            raise self._error
        if value is None:
            return []
        self._number += 1
        outputs: ChoiceOutputs = []
        for index, output in decode_entry(value):
            self.choices[index].add_response(output)
            outputs.append((index, output))
        return outputs

    async def whole(self) -> ChoiceOutputs:
        """All outputs of every choice. Raises like next()."""
        outputs: ChoiceOutputs = []
        while more := await self.next():
            outputs += more
        return merged_by_choice(outputs)

    def fail(self, error: BaseException) -> None:
        """Ends the response with an error; the first one counts."""
        if self._error is None:
            self._error = error
        if self._waiting is not None:
            self._waiting.cancel()
        self.abort()

    def abort(self) -> None:
        """Follows no more. Nothing is generated for nobody."""
        if self._drive is not None:
            self._drive.leave(self)
            self._drive = None

    async def _entry(self) -> bytes | None:
        """None: it has ended."""
        while not self._unread:
            if self._drive is None:
                tail = await self._keeper.log.read(self._id, self._number)
                if tail is None:
                    raise _no_room()
                self._unread.extend(tail.values)
                if not tail.values:
                    if tail.ended:
                        return None
                    await self._join(is_free=tail.is_free)
                continue
            value = await self._drive.entry(self._number)
            if value is not None:
                return value
            has_ended, self._drive = self._drive.has_ended, None
            if has_ended:
                return None
            await asyncio.sleep(POLL_S)
        return self._unread.popleft()

    async def _join(self, *, is_free: bool) -> None:
        """Follows this process's drive, if it has one or may have; otherwise waits for another look."""
        drive = self._keeper.drives.get(self._id)
        if drive is None and is_free:
            drive = self._start_drive()
        if drive is None:
            await asyncio.sleep(POLL_S)
        elif drive.is_stopping:
            await drive.closed.wait()
        else:
            drive.join(self)
            self._drive = drive


def _nothing(choices: Iterable[PendingChoice]) -> None:
    """Nothing to abort: others do that."""


def _no_room() -> ApiError:
    return ApiError(
        503,
        "what is kept of this generation has made room for others: try again, without Last-Event-ID, or see "
        "--generation-store-size and --max-stored-generations",
    )
