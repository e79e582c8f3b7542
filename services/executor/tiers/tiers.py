"""The tiers of one executor, put together."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

import numpy as np

from pagewire.services.executor.tiers.contents import Contents, Key
from pagewire.services.executor.tiers.copies import BlockCopies
from pagewire.services.executor.tiers.disk import DiskTier
from pagewire.services.executor.tiers.host import HostBlocks
from pagewire.services.executor.tiers.joined import WholeSizes
from pagewire.services.executor.tiers.loads import Load, Loads
from pagewire.services.executor.tiers.rates import Rate
from pagewire.services.executor.tiers.saves import Saves

logger = logging.getLogger(__name__)

LAST_WRITES_S = 5.0
_SAVING_S = 5.0


class Tiers:
    """Host memory, the directory, and what is on its way to and from both."""

    def __init__(
        self,
        copies: BlockCopies,
        host: HostBlocks,
        disk: DiskTier | None,
        block_bytes: Sequence[int],
        whole: WholeSizes | None = None,
    ) -> None:
        """block_bytes: of each group. whole: if other ranks have parts of the same blocks."""
        self.host, self.disk, self.block_bytes = host, disk, tuple(block_bytes)
        self.whole = whole or WholeSizes(self.block_bytes, host.num_bytes)
        self.copies = copies
        self.saves = Saves(copies, host, disk)
        self.loads = Loads(copies, host, disk, self.saves)
        self._has_threads = False
        self._reset_at = 0
        self.format = ""  # "" = of weights that are not known yet: nothing is saved or found
        self.host_rate = Rate()

    @property
    def rates(self) -> dict[str, Rate]:
        """The cost of loading from each tier."""
        return {"host": self.host_rate, "disk": Rate() if self.disk is None else self.disk.rate}

    @property
    def exist(self) -> bool:
        """True if blocks are kept; if not, they can still be loaded from other executors."""
        return self.host.is_tier or self.disk is not None

    @property
    def contents(self) -> dict[str, Contents]:
        """The blocks of each tier, the fastest first."""
        found = {"host": self.host.contents} if self.host.is_tier else {}
        return found if self.disk is None else found | {"disk": self.disk.directory.contents}

    def open(self, kv_format: str) -> None:
        """Makes this the format of all blocks. Not called on the device thread."""
        if kv_format == self.format:
            return
        if not self._has_threads:
            self._has_threads = True
            self.saves.start()
            self.loads.start()
        self.format = kv_format
        self.host.open(kv_format)
        if self.disk is not None:
            self.disk.open(kv_format)

    def on_other_weights(self) -> None:
        """Ends loads, and saves that have not begun; the others keep their format. Called on the device thread, before
        the KV cache becomes void."""
        self.loads.cancel()
        self.saves.drop()
        self.format = ""
        self.host.open("")

    def rest(self) -> None:
        """Lets the KV cache go, until `copies` are bound to another one; the tiers keep theirs. Called on the device
        thread."""
        self.loads.cancel()
        self.saves.drop()
        self.saves.wait(None, _SAVING_S)
        self.saves.forget()  # what has not been copied by now may be read from memory that is gone
        self.copies.bind([])

    def load(self, load: Load) -> None:
        """Begins a load before the next step. Called on the device thread."""
        self.loads.begin(load, self.format)

    def save(self, blocks: Iterable[tuple[Key, int]]) -> None:
        """Saves blocks of the step that was just launched. Called on the device thread."""
        if self.format and self.exist:
            self.saves.add(self.format, blocks)

    def forget(self, keys: Sequence[Key]) -> None:
        """Forgets blocks in every tier; none: all. May wait for the disk."""
        self.saves.forget(set(keys) or None)
        if not keys:
            self.host.clear()
        for key in keys:
            self.host.forget(key)
        if self.disk is None:
            return
        if not keys:
            self.disk.clear()
        for key in keys:
            self.disk.forget(key)

    def keep_reset(self, reset_at: int) -> None:
        """Notes that everything was forgotten for a reset of this time. May wait for the disk; raises OSError."""
        self._reset_at = max(reset_at, self._reset_at)
        if self.disk is not None:
            self.disk.directory.keep_reset(reset_at)

    def reset_at(self) -> int:
        """Returns the time of the latest reset; 0: there was none. May wait for the disk; raises OSError."""
        return self._reset_at if self.disk is None else self.disk.directory.reset_at()

    def read(self, key: Key) -> tuple[bytes, int] | None:
        """Returns a block of its tiers and its checksum, for another executor. Waits for one that is being saved, and
        perhaps for the disk."""
        self.saves.wait({key}, _SAVING_S)
        if (slot := self.host.find(key)) is not None:
            found: tuple[bytes, int] | None = bytes(slot.contents), slot.checksum
            self.host.release(slot)
            return found
        if self.disk is None:
            return None
        into = np.empty(self.block_bytes[key[0]], dtype=np.uint8)
        checksum = self.disk.read(key, into)
        return None if checksum is None else (bytes(into), checksum)

    def close(self, timeout: float = LAST_WRITES_S) -> None:
        """Ends the threads; what was to be saved is written if the disk takes no longer than `timeout` seconds."""
        until = time.monotonic() + timeout
        self.loads.close()
        self.saves.wait(None, timeout)
        self.saves.close(max(0.0, until - time.monotonic()))
        if self.disk is not None:
            self.disk.close(max(0.0, until - time.monotonic()))
        self.host.close()
