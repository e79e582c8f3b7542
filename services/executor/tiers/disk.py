"""The directory as a tier: blocks are written in the background, and its errors cost blocks, nothing else.

While a write fails, blocks are left out for a while; while a read takes too long, none is begun.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from typing import NamedTuple

import numpy as np

from pagewire.process.priority import step_back
from pagewire.services.executor.device.memory import mib
from pagewire.services.executor.tiers import metrics
from pagewire.services.executor.tiers.block_files import Damaged
from pagewire.services.executor.tiers.contents import Key
from pagewire.services.executor.tiers.directory import Directory
from pagewire.services.executor.tiers.host import HostBlocks, Slot
from pagewire.services.executor.tiers.rates import Rate, of_directory

logger = logging.getLogger(__name__)

_PAUSE_S = 10.0  # without writes, after one that failed
_SLOW_READ_S = 5.0
_LOOK_EVERY_S = 1.0
_CAUSES = {
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
    errno.EROFS: "read_only",
    errno.EACCES: "read_only",
    errno.EPERM: "read_only",
}


class _Write(NamedTuple):
    kv_format: str
    key: Key
    slot: Slot  # pinned


class DiskTier:
    """Writes blocks on a thread of its own, which also notices what other executors do; reads on the caller's."""

    def __init__(self, directory: Directory, host: HostBlocks, max_queued: int) -> None:
        """max_queued: bytes that wait to be written."""
        self.directory = directory
        self._host = host
        self._max_queued = max_queued
        self._changed = threading.Condition()
        self._queue: deque[_Write] = deque()
        self._num_queued = 0  # bytes
        self._unwritten: dict[Key, _Write] = {}  # what is queued, and what is being written
        self._format: str | None = None  # to be opened
        self._is_open = threading.Event()
        self._is_closed = False
        self._paused_until = 0.0
        self._said: set[str] = set()  # causes that were logged, and still exist
        self.rate = Rate()
        self._reads: dict[int, float] = {}  # thread -> when its read began
        self._thread = threading.Thread(target=self._run, name="kv-disk", daemon=True)
        self._thread.start()

    def open(self, kv_format: str) -> None:
        """Makes this the format to read and write, soon. Does not wait for the disk."""
        self._is_open.clear()
        self.directory.contents.clear()
        with self._changed:
            self._format = kv_format
            self._unwritten.clear()
            self._changed.notify_all()

    def wait_open(self, timeout: float) -> bool:
        """Waits until it is known what the directory holds."""
        return self._is_open.wait(timeout)

    def put(self, kv_format: str, key: Key, slot: Slot) -> None:
        """Writes a pinned slot and releases it; or releases it at once, if there is no use in waiting for the disk."""
        with self._changed:
            is_late = self._num_queued + slot.contents.nbytes > self._max_queued
            if not is_late and time.monotonic() >= self._paused_until:
                self._queue.append(_Write(kv_format, key, slot))
                self._unwritten[key] = self._queue[-1]
                self._num_queued += slot.contents.nbytes
                self._changed.notify_all()
                return
        metrics.skipped("disk_slow" if is_late else "disk_failed")
        self._host.release(slot)

    @property
    def is_stuck(self) -> bool:
        """True while a read takes so long that others should not wait for the disk as well."""
        return any(time.monotonic() - began > _SLOW_READ_S for began in list(self._reads.values()))

    def read(self, key: Key, into: np.ndarray) -> int | None:
        """Reads a block and returns its checksum; None if it is not there, or damaged."""
        with self._changed:
            if (write := self._unwritten.get(key)) is not None:
                np.copyto(into, write.slot.contents)
                return write.slot.checksum
        if self.is_stuck or not self._is_open.is_set():
            metrics.missed("disk_slow")
            return None
        thread = threading.get_ident()
        self._reads[thread] = time.monotonic()
        try:
            checksum = self.directory.read(key, into)
        except FileNotFoundError:
            metrics.missed("gone")
            return None
        except Damaged as error:
            metrics.missed("damaged")
            self._say("damaged", f"{error} was damaged, and is deleted; its tokens are computed again")
            return None
        except OSError as error:
            metrics.missed("unreadable")
            self._say("unreadable", f"blocks cannot be read, and are computed again: {error}")
            return None
        finally:
            del self._reads[thread]
        self._said.discard("unreadable")
        return checksum

    def forget(self, key: Key) -> None:
        with self._changed:
            for write in [write for write in self._queue if write.key == key]:
                self._remove(write)
            self._unwritten.pop(key, None)  # if it is being written
        self._delete(key)

    def _delete(self, key: Key) -> None:
        try:
            self.directory.forget(key)
        except OSError as error:
            self._say("undeleted", f"blocks cannot be deleted: {error}")

    def clear(self) -> None:
        """Deletes all blocks of the format. Raises OSError if one may still be there."""
        with self._changed:
            for write in list(self._queue):
                self._remove(write)
            self._unwritten.clear()
        try:
            self.directory.clear()
        except OSError as error:
            self._say("undeleted", f"blocks cannot be deleted: {error}")
            raise

    def _remove(self, write: _Write) -> None:
        self._queue.remove(write)
        self._unwritten.pop(write.key, None)
        self._num_queued -= write.slot.contents.nbytes
        self._host.release(write.slot)

    def close(self, timeout: float) -> None:
        """Ends the thread after what waits to be written, or after `timeout` seconds."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(timeout)

    def _run(self) -> None:
        step_back()
        looked = time.monotonic()
        while (item := self._next(looked + _LOOK_EVERY_S)) is not None:
            if isinstance(item, _Write):
                self._write(item)
                self._end(item)
            elif isinstance(item, str):
                self._open(item)
            if time.monotonic() >= looked + _LOOK_EVERY_S:
                self._look()
                looked = time.monotonic()

    def _end(self, write: _Write) -> None:
        with self._changed:
            if is_wanted := self._unwritten.get(write.key) is write:
                del self._unwritten[write.key]
        self._host.release(write.slot)
        if not is_wanted:  # it was forgotten meanwhile, or is queued again
            self._delete(write.key)

    def _next(self, until: float) -> _Write | str | bool | None:
        """Waits for a block to write or a format to open; True when the time has come to look; None: the end."""
        with self._changed:
            while True:
                if self._format is not None:
                    kv_format, self._format = self._format, None
                    return kv_format
                if self._queue:
                    write = self._queue.popleft()
                    self._num_queued -= write.slot.contents.nbytes
                    return write
                if self._is_closed:
                    return None
                if (left := until - time.monotonic()) <= 0:
                    return True
                self._changed.wait(left)

    def _open(self, kv_format: str) -> None:
        try:
            self.directory.open(kv_format)
            if self.rate == Rate():
                self.rate = of_directory(self.directory.scratch)
                logger.info(
                    "--kv-offloading-dir: %d blocks of this model, %s of all, reads at %s/s",
                    len(self.directory.contents),
                    mib(self.directory.num_bytes),
                    mib(int(self.rate.bytes_per_second)),
                )
        except OSError as error:
            self._failed(error)
        with self._changed:
            if self._format is None:
                self._is_open.set()

    def _look(self) -> None:
        try:
            self.directory.look()
        except OSError as error:
            self._say("unreadable", f"the directory of blocks cannot be read: {error}")
        metrics.HELD_BYTES.labels("disk").set(self.directory.num_bytes)

    def _write(self, write: _Write) -> None:
        if time.monotonic() < self._paused_until:
            metrics.skipped("disk_failed")
            return
        if write.key in self.directory.contents:
            return
        began = time.perf_counter()
        try:
            size = self.directory.write(write.kv_format, write.key, write.slot.contents, write.slot.checksum)
        except OSError as error:
            self._failed(error)
            return
        metrics.stored("disk", size, time.perf_counter() - began)
        self._said -= {"full", "read_only", "unwritable"}

    def _failed(self, error: OSError) -> None:
        """Counts and reports a write that failed, makes room if the disk is full, and pauses."""
        cause = _CAUSES.get(error.errno or 0, "unwritable")
        metrics.skipped(f"disk_{cause}")
        self._say(cause, f"blocks cannot be written, and are left out while this lasts: {error}")
        if cause == "full":
            try:
                self.directory.make_room()
            except OSError as other:
                self._say("undeleted", f"blocks cannot be deleted: {other}")
        self._paused_until = time.monotonic() + _PAUSE_S

    def _say(self, cause: str, message: str) -> None:
        """Logs a cause once, until it is gone."""
        if cause not in self._said:
            self._said.add(cause)
            logger.warning("--kv-offloading-dir: %s", message)
