"""Memory of the host for blocks: a tier, or a small area that blocks pass on their way to and from other tiers.

It is divided into slots, a number for each group in proportion to the group's part of the KV cache. A slot in use is
pinned; the others are reused, the longest unused one first.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagewire.services.executor.tiers import metrics
from pagewire.services.executor.tiers.contents import Contents, Key
from pagewire.services.executor.tiers.shared import Memory


@dataclass(frozen=True)
class GroupSize:
    """The blocks of one group in the KV cache."""

    num_blocks: int
    block_bytes: int


@dataclass(eq=False)
class Slot:
    """Memory for one block."""

    group: int
    index: int  # in the group
    contents: np.ndarray  # uint8 [block_bytes]
    key: Key | None = None  # of the block that others may find here
    checksum: int = 0
    pins: int = 0


def slots_of(num_bytes: int, groups: Sequence[GroupSize], least: int = 1) -> list[int]:
    """Returns the number of slots of each group: together they take num_bytes, or more where a group would have fewer
    than `least`. A group with all layers on other ranks has as many slots, of no bytes."""
    whole = max(1, sum(group.num_blocks * group.block_bytes for group in groups))
    return [max(least, num_bytes * group.num_blocks // whole) if group.num_blocks else 0 for group in groups]


class HostBlocks:
    """The slots. Used on all threads; no call waits for anything but other calls, `acquire` excepted."""

    def __init__(self, memory: Memory, is_tier: bool) -> None:
        """is_tier: blocks that are complete can be found here until their slot is needed."""
        self.contents = Contents()
        self.is_tier = is_tier
        self._format = ""
        self._memory = memory
        self._changed = threading.Condition()
        self._free = [
            [Slot(group, index, contents) for index, contents in enumerate(part)]
            for group, part in enumerate(memory.parts)
        ]
        self._found: list[OrderedDict[bytes, Slot]] = [OrderedDict() for _ in memory.parts]
        if is_tier:
            metrics.HELD_BYTES.labels("host").set_function(lambda: self.num_held)
            metrics.HOST_USAGE.set_function(lambda: self.num_held / max(1, self.num_bytes))

    @property
    def name(self) -> str:
        """The name by which other executors of this host can read it."""
        return self._memory.name

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self._memory.parts)

    @property
    def num_held(self) -> int:
        """Bytes of the blocks that can be found."""
        return sum(len(found) * part.shape[1] for found, part in zip(self._found, self._memory.parts, strict=True))

    def acquire(self, group: int, timeout: float = 0.0) -> Slot | None:
        """Returns a pinned slot without a block; None if all are in use, for longer than `timeout` seconds."""
        with self._changed:
            slot = self._take(group)
            until = time.monotonic() + timeout
            while slot is None and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)  # for a slot of any group, which another call may take first
                slot = self._take(group)
            return slot

    def _take(self, group: int) -> Slot | None:
        if self._free[group]:
            slot = self._free[group].pop()
        else:
            oldest = next((slot for slot in self._found[group].values() if not slot.pins), None)
            if oldest is None:
                return None
            slot = oldest
            self._hide(slot)
        slot.pins = 1
        return slot

    def _hide(self, slot: Slot) -> None:
        """Makes the slot's block unfindable."""
        if slot.key is not None:
            self._memory.hide(slot.group, slot.index)
            del self._found[slot.group][slot.key[1]]
            self.contents.remove(slot.key)
            slot.key = None

    def publish(self, kv_format: str, slot: Slot, key: Key, checksum: int) -> None:
        """Lets others find a block that is complete. The slot stays pinned until it is released."""
        slot.checksum = checksum
        with self._changed:
            if self.is_tier and kv_format == self._format and key[1] not in self._found[key[0]]:
                slot.key = key
                self._found[key[0]][key[1]] = slot
                self._memory.show(slot.group, slot.index, key[1], checksum)
                self.contents.add(key)

    def release(self, slot: Slot) -> None:
        with self._changed:
            slot.pins -= 1
            if not slot.pins:
                if slot.key is None:
                    self._free[slot.group].append(slot)
                self._changed.notify_all()

    def find(self, key: Key) -> Slot | None:
        """Returns the slot that holds a block, pinned."""
        with self._changed:
            slot = self._found[key[0]].get(key[1])
            if slot is not None:
                slot.pins += 1
                self._found[key[0]].move_to_end(key[1])
            return slot

    def forget(self, key: Key) -> None:
        with self._changed:
            slot = self._found[key[0]].get(key[1])
            if slot is not None:
                self._hide(slot)
                if not slot.pins:
                    self._free[slot.group].append(slot)
                    self._changed.notify_all()

    def open(self, kv_format: str) -> None:
        """Makes this the format of all blocks from now on."""
        with self._changed:
            self._format = kv_format
        self.clear()

    def clear(self) -> None:
        with self._changed:
            for found in self._found:
                for slot in list(found.values()):
                    self._hide(slot)
                    if not slot.pins:
                        self._free[slot.group].append(slot)
            self._changed.notify_all()

    def close(self) -> None:
        self._memory.close()
