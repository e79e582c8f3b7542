"""A kept generation in the hands of this process: what the line says goes into the log, and then to who follows."""

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.reply import ChoiceOutputs, PendingChoice
from pagewire.gateway.kept.entries import by_choice, encode_entry
from pagewire.gateway.kept.group_commit import GroupCommit
from pagewire.gateway.kept.log import Append, Log
from pagewire.v1.inference_pb2 import GenerateResponse
from pagewire.wire.rpc import RpcError

logger = logging.getLogger(__name__)

# Between two entries of an answer that is told as a whole: who reads only its end needs no finer ones.
WHOLE_PACE_S = 0.25


class Source(Protocol):
    """What the line says of one generation; a `Reply`, mostly."""

    choices: list[PendingChoice]

    @property
    def has_ended(self) -> bool:
        """Nothing comes after what was taken."""

    async def next(self) -> ChoiceOutputs:
        """Raises RpcError or ApiError."""

    def abort(self) -> None: ...


# Starts the generation after what has been said of each choice. Raises RpcError.
Start = Callable[[Sequence[Sequence[GenerateResponse]]], Source]


class Drive:
    """Runs while somebody follows. A generation that nobody follows rests, and goes on when somebody comes again."""

    def __init__(self, id: str, log: Log, commit: GroupCommit, start: Start, num_choices: int, pace_s: float) -> None:
        """pace_s: seconds between two entries, at least; 0: as the line speaks."""
        self.owner = uuid.uuid4().hex
        self.has_ended = False  # all is said
        self.is_stopping = False
        self.closed = asyncio.Event()
        self.on_close: Callable[[], object] = lambda: None
        self._id = id
        self._log = log
        self._commit = commit
        self._start = start
        self._num_choices = num_choices
        self._pace_s = pace_s
        self._followers: set[object] = set()
        self._entries: list[bytes] = []
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="kept generation")

    def join(self, follower: object) -> None:
        self._followers.add(follower)

    def leave(self, follower: object) -> None:
        self._followers.discard(follower)
        if not self._followers:
            self.stop()

    def stop(self) -> None:
        self.is_stopping = True
        self._task.cancel()

    async def entry(self, number: int) -> bytes | None:
        """None: it ends before, or goes on elsewhere. Raises RpcError or ApiError if it failed there."""
        while number >= len(self._entries) and not self.closed.is_set():
            await self._changed.wait()
        if number < len(self._entries):
            return self._entries[number]
        if self._error is not None:
            raise self._error
        return None

    async def _run(self) -> None:
        try:
            if await self._log.claim(self._id, self.owner):
                await self._generate()
        except (ApiError, RpcError) as error:
            self._error = error
        except Exception:
            logger.exception("a kept generation failed")
            self._error = ApiError(500, "internal error; the gateway's log has the cause")
        finally:
            if not self.has_ended:
                with suppress(ApiError):  # then its lease runs out
                    await self._log.release(self._id, self.owner)
            self.on_close()
            self.closed.set()
            self._notify()

    async def _generate(self) -> None:
        tail = await self._log.read(self._id, 0)
        if tail is None:
            return
        earlier = by_choice(tail.values, self._num_choices)
        prompts_told = {index for index, outputs in enumerate(earlier) if outputs}
        for value in tail.values:
            self._add(value)
        reply = self._start(earlier)
        try:
            while outputs := await reply.next():
                value, is_last = encode_entry(reply.choices, outputs, prompts_told), reply.has_ended
                append = Append(self._id, self.owner, len(self._entries), value, is_last)
                if not await self._commit.append(append):
                    return  # another process has it
                self.has_ended = is_last
                self._add(value)
                if self._pace_s and not is_last:
                    await asyncio.sleep(self._pace_s)
        finally:
            reply.abort()

    def _add(self, value: bytes) -> None:
        self._entries.append(value)
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
