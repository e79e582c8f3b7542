"""Blocks on their way from the KV cache to the tiers.

A block that is to be saved stays where it is until a thread has copied it, beside the steps. Only if a step is about to
overwrite it before, the device thread starts the copy itself, or leaves it out if there is no room: no step waits for a
tier.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import xxhash

from pagewire.process.priority import step_back
from pagewire.services.executor.tiers import metrics
from pagewire.services.executor.tiers.contents import Key
from pagewire.services.executor.tiers.copies import BlockCopies
from pagewire.services.executor.tiers.disk import DiskTier
from pagewire.services.executor.tiers.host import HostBlocks, Slot

logger = logging.getLogger(__name__)

_WAIT_FOR_ROOM_S = 0.05
_STARTING_S = 1.0  # longest wait of a step for a copy that the thread starts just now


class _State(enum.Enum):
    WAITS = enum.auto()
    STARTS = enum.auto()  # the thread starts the copy just now
    STARTED = enum.auto()
    OFF = enum.auto()  # left out


@dataclass(eq=False)
class _Save:
    kv_format: str
    key: Key
    block: int
    after: Any  # when the block is complete
    state: _State = _State.WAITS
    slot: Slot | None = None
    until: Any = None  # when the copy is done


class Saves:
    """The blocks that are being saved."""

    def __init__(self, copies: BlockCopies, host: HostBlocks, disk: DiskTier | None) -> None:
        self._copies, self._host, self._disk = copies, host, disk
        self._changed = threading.Condition()
        self._pending: dict[tuple[int, int], _Save] = {}  # (group, block) -> the save that still reads it
        self._waiting: deque[_Save] = deque()
        self._started: deque[_Save] = deque()  # by the device thread
        self._taken: _Save | None = None  # by the thread; it may be in neither of the above
        self._is_closed = False
        self._unfinished: Counter[Key] = Counter()  # saves of blocks that are not in the tiers yet
        self._thread = threading.Thread(target=self._run, name="kv-saves", daemon=True)

    def start(self) -> None:
        """Starts the thread. Not to be called on the device thread, as it would share its processor."""
        self._thread.start()

    # -- on the device thread ----------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """True if steps may write to any block."""
        return not self._pending

    def add(self, kv_format: str, blocks: Iterable[tuple[Key, int]]) -> None:
        """Saves blocks that are complete once the steps launched so far are done. blocks: (key, block id)s."""
        after = self._copies.now()
        with self._changed:
            for key, block in blocks:
                place = key[0], block
                if (other := self._pending.get(place)) is not None:
                    if other.key == key and other.kv_format == kv_format:
                        continue
                    self._leave_out(other)
                save = self._pending[place] = _Save(kv_format, key, block, after)
                self._waiting.append(save)
                self._unfinished[key] += 1
            self._changed.notify_all()

    def release(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Lets later steps write to these blocks, (group, block id)s: their copies are started, and the steps wait for
        these on the device."""
        with self._changed:
            for place in blocks:
                if (save := self._pending.get(place)) is None:
                    continue
                if not self._changed.wait_for(partial(_is_settled, save), _STARTING_S):
                    self._spoil(save)
                if save.state is _State.WAITS:
                    self._start_now(save)
                if save.state is _State.STARTED:
                    self._copies.hold_steps(save.until)
                if self._pending.get(place) is save:
                    del self._pending[place]

    def _start_now(self, save: _Save) -> None:
        slot = None if self._is_known(save.key) else self._host.acquire(save.key[0])
        if slot is None:
            self._leave_out(save)
            return
        save.slot, save.state = slot, _State.STARTED
        save.until = self._copies.save(save.key[0], save.block, slot.contents, save.after)
        self._started.append(save)
        self._changed.notify_all()

    def _spoil(self, save: _Save) -> None:
        """Takes in that a block is overwritten although its copy, which hangs, may not be complete: no tier gets it."""
        save.kv_format = ""
        metrics.skipped("late")

    def drop(self) -> None:
        """Leaves out what has not been copied yet."""
        with self._changed:
            for save in list(self._pending.values()):
                if save.state is _State.WAITS:
                    self._leave_out(save)

    def _leave_out(self, save: _Save) -> None:
        if save.state is _State.WAITS:
            save.state = _State.OFF
            if not self._is_known(save.key):
                metrics.skipped("no_room")
            self._end(save)

    # -- on any thread -----------------------------------------------------------------------------------------------

    def _is_known(self, key: Key) -> bool:
        """Returns whether every tier has the block."""
        if self._host.is_tier and key not in self._host.contents:
            return False
        return self._disk is None or key in self._disk.directory.contents

    def _end(self, save: _Save) -> None:
        """Ends a save. Call it with the lock."""
        place = save.key[0], save.block
        if self._pending.get(place) is save:
            del self._pending[place]
        self._unfinished[save.key] -= 1
        if not self._unfinished[save.key]:
            del self._unfinished[save.key]
        self._changed.notify_all()

    def forget(self, keys: set[Key] | None = None) -> None:
        """Leaves out these blocks, or all: those that are being copied as well."""
        with self._changed:
            taken = [] if self._taken is None else [self._taken]
            for save in [*self._pending.values(), *self._started, *taken]:
                if keys is None or save.key in keys:
                    self._leave_out(save)
                    save.kv_format = ""  # a tier of another format takes it no more

    def wait(self, keys: Set[Key] | None, timeout: float) -> None:
        """Waits until none of these blocks, or of all, is on its way to host memory."""
        if self._unfinished:
            with self._changed:
                self._changed.wait_for(lambda: not self._among_unfinished(keys), timeout)

    def _among_unfinished(self, keys: Set[Key] | None) -> bool:
        return bool(self._unfinished) if keys is None else any(key in self._unfinished for key in keys)

    def close(self, timeout: float) -> None:
        """Ends the thread after the copies that were started, or after `timeout` seconds."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout)

    # -- on the thread that copies -----------------------------------------------------------------------------------

    def _run(self) -> None:
        step_back()
        while (save := self._next()) is not None:
            try:
                if save.state is _State.STARTED or self._start(save):
                    self._finish(save)
            except Exception:
                logger.exception("a KV block could not be saved")
                self._abandon(save)

    def _next(self) -> _Save | None:
        with self._changed:
            while True:
                if self._started:
                    self._taken = self._started.popleft()
                    return self._taken
                while self._waiting and self._waiting[0].state is not _State.WAITS:
                    self._waiting.popleft()
                if self._waiting:
                    self._taken = self._waiting[0]
                    return self._taken
                if self._is_closed:
                    return None
                self._changed.wait()

    def _start(self, save: _Save) -> bool:
        """Starts a copy; returns False if it was left out, started by the device thread, or has no room yet."""
        if self._is_known(save.key):
            with self._changed:
                self._leave_out(save)
            return False
        slot = self._host.acquire(save.key[0], _WAIT_FOR_ROOM_S)
        if slot is None:
            return False
        with self._changed:
            is_mine = save.state is _State.WAITS
            if is_mine:
                save.state, save.slot = _State.STARTS, slot
        if not is_mine:
            self._host.release(slot)
            return False
        save.until = self._copies.save(save.key[0], save.block, slot.contents, save.after)
        with self._changed:
            save.state = _State.STARTED
            self._changed.notify_all()
        return True

    def _finish(self, save: _Save) -> None:
        """Hands a block over to the tiers."""
        slot = save.slot
        assert slot is not None
        began = time.perf_counter()
        self._copies.wait(save.until)
        slot.checksum = xxhash.xxh3_64_intdigest(slot.contents.data)
        with self._changed:  # a block that is forgotten from now on is in the tiers
            if self._host.is_tier and save.kv_format:
                self._host.publish(save.kv_format, slot, save.key, slot.checksum)
                metrics.stored("host", slot.contents.nbytes, time.perf_counter() - began)
            if self._disk is not None and save.kv_format and save.key not in self._disk.directory.contents:
                self._disk.put(save.kv_format, save.key, slot)
            else:
                self._host.release(slot)
            self._taken = None
            self._end(save)

    def _abandon(self, save: _Save) -> None:
        """Leaves out a block after a fault, and lets a step that waits for its copy go on."""
        with self._changed:
            if save.state is _State.OFF:
                return
            save.state = _State.OFF
            metrics.skipped("fault")
            if save.slot is not None:
                self._host.release(save.slot)
            self._taken = None
            self._end(save)


def _is_settled(save: _Save) -> bool:
    return save.state is not _State.STARTS
