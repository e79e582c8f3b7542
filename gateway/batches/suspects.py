"""Lines of batches that a gateway was handling when it failed.

A line occupies the event loop while it is parsed, checked and converted, and an unforeseen one may end the whole
process there. What a process handles is therefore recorded in a file, which outlives it. A line that was handled when a
process failed is handled by the next one while no other line is; if that fails, too, it is taken for the cause, and is
answered with an error.

A process that is killed may have been killed for its memory, which a line took, or for any other reason. Such an end
counts half.
"""

import asyncio
import fcntl
import logging
import os
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from pagewire.process import process, watchdog

logger = logging.getLogger(__name__)

# Failures after which the line that was handled in each is refused.
MAX_FAILURES = 2
# What an end counts of which the reason is unknown.
_UNKNOWN = 0.5
# Seconds after which a line is no longer handled if the event loop still turns: it waits for its tokens.
HANDLED_S = 0.1
_PREFIX = "handling-"
_FAILED = b"failed"


class Suspects:
    """Records the lines that this process handles, and finds those that others handled when they failed."""

    def __init__(self, folder: Path) -> None:
        """folder: of the batches, which the gateways of a host share."""
        self._folder = folder
        self._handled: list[tuple[str, int]] = []
        self._num_waiting_suspects = 0
        self._has_suspect = False  # is handling one
        self._moved = asyncio.Event()  # set, and replaced, when a line is no longer handled
        _settle_all(folder)
        self._path = folder / f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex}"
        self._is_error_logged = False
        unlocked = self._path.with_name(f"new-{self._path.name}")
        self._file = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        fcntl.flock(self._file, fcntl.LOCK_EX)  # until this process ends
        unlocked.rename(self._path)
        watchdog.call_before_end(self._note_failure)

    def close(self) -> None:
        """Deletes the record: this process ends in order."""
        watchdog.do_not_call(self._note_failure)
        self._path.unlink(missing_ok=True)
        os.close(self._file)

    def failures(self, batch: str) -> Mapping[int, float]:
        """Returns how often a process failed while it handled a line, by number of the line."""
        _settle_all(self._folder)
        counts = Counter[int]()
        with suppress(FileNotFoundError):
            for line in failures_file(self._folder, batch).read_text().splitlines():
                number, _, reason = line.partition(" ")
                counts[int(number)] += _UNKNOWN if reason else 1  # type: ignore[assignment]
        return counts

    @asynccontextmanager
    async def handling(self, batch: str, number: int, *, is_suspect: bool) -> AsyncIterator[None]:
        """Handles a line in the block, a suspect while no other line is handled."""
        await (self._wait_to_be_alone() if is_suspect else self._wait_for_suspects())
        line = (batch, number)
        self._has_suspect = is_suspect
        self._handled.append(line)
        self._write()

        def end() -> None:
            if line in self._handled:
                self._handled.remove(line)
                self._has_suspect = False
                self._write()
                self._move()

        timer = asyncio.get_running_loop().call_later(HANDLED_S, end)
        try:
            yield
        finally:
            timer.cancel()
            end()

    async def _wait_to_be_alone(self) -> None:
        self._num_waiting_suspects += 1
        try:
            while self._handled:
                await self._moved.wait()
        finally:
            self._num_waiting_suspects -= 1
            self._move()

    async def _wait_for_suspects(self) -> None:
        while self._has_suspect or self._num_waiting_suspects:
            await self._moved.wait()

    def _move(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    def _write(self) -> None:
        text = "".join(f"{batch} {number}\n" for batch, number in self._handled).encode()
        try:
            os.pwrite(self._file, text, 0)
            os.ftruncate(self._file, len(text))
        except OSError as error:
            if not self._is_error_logged:
                self._is_error_logged = True
                logger.warning("cannot record which lines of batches are handled: %s", error)

    def _note_failure(self) -> None:
        """Called by the watchdog before it ends this process."""
        with suppress(OSError):
            os.pwrite(self._file, _FAILED + b"\n", os.fstat(self._file).st_size)


def failures_file(folder: Path, batch: str) -> Path:
    """Returns the file with a line for each failure: the number of the line that was handled, and " unknown" if the
    reason is."""
    return folder / f"{batch}.failures"


def _settle_all(folder: Path) -> None:
    """Counts the failures of the processes that have ended since."""
    for path in folder.glob(f"{_PREFIX}*"):
        _settle(folder, path)


def _settle(folder: Path, path: Path) -> None:
    """Counts the failure of the process that left this file, if it has ended."""
    pid = int(path.name.removeprefix(_PREFIX).partition("-")[0])
    try:
        with path.open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lines = file.read().splitlines()
            path.unlink(missing_ok=True)
    except (BlockingIOError, FileNotFoundError):
        return  # it runs, or another process settles it
    has_failed = _FAILED in lines or (process.is_predecessor(pid) and process.predecessor_failed())
    for line in lines:
        batch, _, number = line.decode().partition(" ")
        if not number or not (folder / batch).exists():
            continue  # the batch has ended
        what = "failed" if has_failed else "was killed"
        logger.warning("a gateway %s while it handled line %s of %s", what, number, batch)
        with failures_file(folder, batch).open("a") as failures:
            failures.write(f"{number}\n" if has_failed else f"{number} unknown\n")
