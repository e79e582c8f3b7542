"""The outputs of a kept generation, as one HTTP response reads them from the log, in the place of a `Reply`.

So every response to the generation, the first and any later one, of this gateway or another, has the same events.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.reply import ChoiceOutputs, PendingChoice, Reply, merged_by_choice
from pagewire.gateway.kept.drive import Drive
from pagewire.gateway.kept.entries import decode_entry
from pagewire.gateway.store import Log
from pagewire.v1.inference_pb2 import GenerateRequest

# Between two looks at the entries of another process.
POLL_S = 0.05


class DriveOf(Protocol):
    """Returns the drive of this process, which is started if no process owns the generation."""

    def __call__(self, *, is_free: bool) -> Drive | None: ...


class KeptReply:
    def __init__(self, log: Log, id: str, requests: Sequence[GenerateRequest], drive: DriveOf) -> None:
        self.choices = Reply(_nothing, requests, streaming=False).choices
        self._log = log
        self._id = id
        self._drive_of_process = drive
        self._number = 0  # of the next entry
        self._unread: deque[bytes] = deque()  # that entry and later ones
        self._drive: Drive | None = None  # that this reply follows
        self._waiting: asyncio.Task[bytes | None] | None = None
        self._error: BaseException | None = None

    async def next(self) -> ChoiceOutputs:
        """Returns the outputs of the next entry; none at the end. Raises RpcError, ApiError, or the error of fail()."""
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
        """Returns all outputs of every choice. Raises like next()."""
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
        """Stops following. A generation without followers rests."""
        if self._drive is not None:
            self._drive.leave(self)
            self._drive = None

    async def _entry(self) -> bytes | None:
        """Waits for the next entry; None at the end."""
        while not self._unread:
            if self._drive is None:
                tail = await self._log.read(self._id, self._number)
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
        """Follows the drive of this process, if there is one or can be one. Otherwise returns after POLL_S."""
        drive = self._drive_of_process(is_free=is_free)
        if drive is None:
            await asyncio.sleep(POLL_S)
        elif drive.is_stopping:
            await drive.closed.wait()
        else:
            drive.join(self)
            self._drive = drive


def _nothing(choices: Iterable[PendingChoice]) -> None:
    """Drives abort generations; replies have none of their own."""


def _no_room() -> ApiError:
    return ApiError(
        503,
        "this generation made room for others in the store; try again without Last-Event-ID, or start the server with "
        "a larger --generation-store-size or --max-stored-generations",
    )
