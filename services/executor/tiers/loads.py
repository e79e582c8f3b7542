"""Blocks on their way from the tiers to the KV cache.

A block is read into memory of the host and checked before it is copied: a load that was given up writes to no block
later. A load ends in bounded time; what it has not loaded by then is missing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pagewire.services.executor.device.errors import DeviceError
from pagewire.services.executor.tiers import metrics
from pagewire.services.executor.tiers.contents import Key
from pagewire.services.executor.tiers.copies import BlockCopies
from pagewire.services.executor.tiers.disk import DiskTier
from pagewire.services.executor.tiers.host import HostBlocks, Slot
from pagewire.services.executor.tiers.saves import Saves

logger = logging.getLogger(__name__)

LOAD_S = 10.0  # longest time of a load
_SAVING_S = 1.0  # longest wait for blocks that are being saved
_COPYING_S = 30.0  # longest copy of a block
_QUICK_THREADS, _DISK_THREADS = 2, 4


@dataclass(frozen=True)
class Loaded:
    """The outcome of a load."""

    load_id: int
    missing: list[int]  # indices of the blocks that were not loaded
    seconds: float
    num_bytes: dict[str, int]  # tier -> bytes


@dataclass(eq=False)
class Load:
    """Blocks to fill, and what they are to hold."""

    load_id: int
    blocks: Sequence[tuple[Key, int]]  # (key, block id)s
    report: Callable[[Loaded], None]  # called once on any thread, unless the load is cancelled
    source: str = ""
    kv_format: str = ""
    began: float = field(default_factory=time.monotonic)
    # Guarded by the lock of `Loads`:
    is_over: bool = False
    is_reported: bool = False
    num_copying: int = 0
    left: int = 0  # blocks that are neither loaded nor missing yet
    found: set[int] = field(default_factory=set)
    num_bytes: Counter[str] = field(default_factory=Counter)

    @property
    def time_left(self) -> float:
        return max(0.0, self.began + LOAD_S - time.monotonic())


# Begins to read blocks of a load, by their indices, from its source; `place` or `miss` is called for each.
Fetch = Callable[[Load, Sequence[int], Any], None]


class Loads:
    """The loads that have begun."""

    def __init__(self, copies: BlockCopies, host: HostBlocks, disk: DiskTier | None, saves: Saves) -> None:
        self._copies, self._host, self._disk, self._saves = copies, host, disk, saves
        self.fetch: Fetch | None = None  # begins to read blocks of other executors
        self._changed = threading.Condition()
        self._running: set[Load] = set()
        self._quick = ThreadPoolExecutor(_QUICK_THREADS, "kv-loads")
        self._slow = ThreadPoolExecutor(_DISK_THREADS, "kv-reads")

    def start(self) -> None:
        """Starts the threads. Not to be called on the device thread, as they would share its processor."""
        for pool, size in ((self._quick, _QUICK_THREADS), (self._slow, _DISK_THREADS)):
            all_run = threading.Barrier(size)
            for _ in range(size):
                pool.submit(all_run.wait)

    # -- on the device thread ----------------------------------------------------------------------------------------

    def begin(self, load: Load, kv_format: str) -> None:
        """Begins a load, once the steps launched so far are done."""
        after = self._copies.now()
        with self._changed:
            if load.is_over:
                return
            load.left, load.kv_format = len(load.blocks), kv_format
            self._running.add(load)
        self._quick.submit(self._run, load, after)

    def cancel(self) -> None:
        """Ends all loads without a report. No block is written to from now on. Raises DeviceError if a copy hangs."""
        with self._changed:
            for load in self._running:
                load.is_over = load.is_reported = True
            if not self._changed.wait_for(lambda: not any(load.num_copying for load in self._running), _COPYING_S):
                raise DeviceError(f"a copy to the KV cache has not ended for {_COPYING_S:g} s")
            self._running.clear()

    @property
    def running(self) -> int:
        """The number of loads that have not ended."""
        return len(self._running)

    # -- on any thread -----------------------------------------------------------------------------------------------

    def give_up(self, load: Load) -> None:
        """Ends a load: what it has not loaded is missing."""
        with self._changed:
            if load.left and not load.is_over:
                metrics.missed("late", load.left)
            load.is_over = True
        self._report(load)

    def close(self) -> None:
        self.cancel()
        for pool in (self._quick, self._slow):
            pool.shutdown(wait=False, cancel_futures=True)

    # -- on the threads that load ------------------------------------------------------------------------------------

    def _run(self, load: Load, after: Any) -> None:
        """Loads what is in host memory, then lets other threads read the rest."""
        with self._failing(load):
            self._saves.wait({key for key, _ in load.blocks}, min(_SAVING_S, load.time_left))
            rest = []
            for index, (key, _) in enumerate(load.blocks):
                if load.is_over:
                    return
                if (slot := self._host.find(key)) is None:
                    rest.append(index)
                else:
                    self.place(load, index, slot, "host", after)
            if load.source and self.fetch is not None:
                self.fetch(load, rest, after)
            elif self._disk is not None and not load.source:
                indices = iter(rest)
                for _ in range(min(len(rest), _DISK_THREADS)):
                    self._slow.submit(self._read, load, indices, after)
            else:
                for _ in rest:
                    self.miss(load, "source" if load.source else "gone")
            self._report(load)

    def _read(self, load: Load, indices: Iterator[int], after: Any) -> None:
        """Reads blocks from the disk."""
        assert self._disk is not None
        with self._failing(load):
            while True:
                with self._changed:
                    if load.is_over or (index := next(indices, None)) is None:
                        return
                key, _ = load.blocks[index]
                if (slot := self._host.acquire(key[0], load.time_left)) is None:
                    self.miss(load, "late")
                elif (checksum := self._disk.read(key, slot.contents)) is None:
                    self._host.release(slot)
                    self.miss(load)
                else:
                    self.place(load, index, slot, "disk", after, checksum)

    @contextmanager
    def _failing(self, load: Load) -> Iterator[None]:
        """Ends a load with what is there if there is a fault in this program."""
        try:
            yield
        except Exception:
            logger.exception("a load of KV blocks failed; they are computed")
            self.give_up(load)

    def miss(self, load: Load, cause: str = "") -> None:
        """Notes that a block cannot be loaded. cause: to be counted."""
        with self._changed:
            if load.is_over:
                return
            load.left -= 1
        if cause:
            metrics.missed(cause)
        self._report(load)

    def place(self, load: Load, index: int, slot: Slot, tier: str, after: Any, checksum: int | None = None) -> None:
        """Copies a block that was checked from a pinned slot, which it releases, to the KV cache.

        checksum: of a block that is new to the slot, which may be found there from then on.
        """
        with self._changed:
            is_over = load.is_over
            load.num_copying += not is_over
        key, block = load.blocks[index]
        try:
            if not is_over:
                try:
                    self._copies.wait(self._copies.load(key[0], block, slot.contents, after))
                finally:
                    with self._changed:
                        load.num_copying -= 1
                        self._changed.notify_all()
                metrics.hit(tier, slot.contents.nbytes)
                if checksum is not None:
                    self._host.publish(load.kv_format, slot, key, checksum)
                with self._changed:
                    load.left -= 1
                    load.found.add(index)
                    load.num_bytes[tier] += slot.contents.nbytes
        finally:
            self._host.release(slot)
        self._report(load)

    def _report(self, load: Load) -> None:
        """Reports a load once it has ended, and nothing more is copied."""
        with self._changed:
            load.is_over |= not load.left
            if not load.is_over or load.num_copying or load.is_reported:
                return
            load.is_reported = True
            self._running.discard(load)
            missing = [index for index in range(len(load.blocks)) if index not in load.found]
            seconds = time.monotonic() - load.began
        metrics.loaded(sum(load.num_bytes.values()), seconds)
        load.report(Loaded(load.load_id, missing, seconds, dict(load.num_bytes)))
