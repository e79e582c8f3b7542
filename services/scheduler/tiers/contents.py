"""An index of the blocks that the tiers of one executor hold, as the executor reports them.

Nothing depends on it for correctness: a block that is not there any more costs a load that finds nothing.
"""

import time
from collections.abc import Callable, Iterator, Sequence

from pagewire.services.scheduler.memory.block_index import BlockListener
from pagewire.v1.executor_pb2 import BlockHashes, TierChanges

HASH_BYTES = 32
# Executors leave out saves that they have no room for, and do not report these.
_MAX_EXPECTED = 100_000
_DOUBT_S = 30.0


def hashes_of(message: BlockHashes) -> Iterator[bytes]:
    """Yields the hashes of a message."""
    for start in range(0, len(message.hashes), HASH_BYTES):
        yield message.hashes[start : start + HASH_BYTES]


class TierContents:
    """The blocks that each tier holds, by group of layers."""

    def __init__(
        self, kinds: Sequence[int], num_groups: int, index: BlockListener | None = None, indexed_group: int = 0
    ) -> None:
        """kinds: the tiers, the fastest first. index: is kept up to date with the blocks of the indexed group."""
        self._held: dict[int, list[set[bytes]]] = {kind: [set() for _ in range(num_groups)] for kind in kinds}
        # Blocks that steps named to be saved, and that no tier is known to hold yet, the oldest first.
        self._expected: dict[tuple[int, bytes], None] = {}
        # Blocks that a load has just not found, and when they may be asked for again, in this order.
        self._doubted: dict[tuple[int, bytes], float] = {}
        self.is_known = False  # the executor has said all that it held at first
        self.on_known: Callable[[], None] = lambda: None
        self._index = index
        self.indexed_group = indexed_group

    def kind_of(self, group: int, block_hash: bytes) -> int | None:
        """Returns the fastest tier that holds a block; None if there is none."""
        return next((kind for kind, held in self._held.items() if block_hash in held[group]), None)

    def has(self, group: int, block_hash: bytes) -> bool:
        """Returns whether a tier holds a block."""
        if self._doubted and (group, block_hash) in self._doubted:
            return False
        return any(block_hash in held[group] for held in self._held.values())

    def is_in_first(self, group: int, block_hash: bytes) -> bool:
        """Returns whether the first tier holds a block."""
        return any(block_hash in held[group] for held in list(self._held.values())[:1])

    def is_expected(self, group: int, block_hash: bytes) -> bool:
        """Returns whether a block is being saved."""
        return (group, block_hash) in self._expected

    def expect(self, group: int, block_hash: bytes) -> None:
        """Takes in that a step names a block to be saved."""
        self._expected[group, block_hash] = None
        if len(self._expected) > _MAX_EXPECTED:
            del self._expected[next(iter(self._expected))]

    def known(self) -> None:
        """Takes in that the executor has said all that it held at first, or has had the time to."""
        if not self.is_known:
            self.is_known = True
            self.on_known()

    def apply(self, changes: TierChanges) -> None:
        """Takes in what has changed. Changes of a tier or group that the executor did not describe are ignored."""
        if (held := self._held.get(changes.kind)) is not None:
            self._take(held, changes)
        if changes.is_complete:
            self.known()

    def _take(self, held: list[set[bytes]], changes: TierChanges) -> None:
        if changes.cleared:
            self._clear(changes.kind)
        for stored in changes.stored:
            if 0 <= stored.group < len(held):
                self._add(held[stored.group], stored)
        for removed in changes.removed:
            if 0 <= removed.group < len(held):
                for block_hash in hashes_of(removed):
                    held[removed.group].discard(block_hash)
                    self._unlist(removed.group, block_hash)

    def _add(self, held: set[bytes], stored: BlockHashes) -> None:
        for block_hash in hashes_of(stored):
            held.add(block_hash)
            self._expected.pop((stored.group, block_hash), None)
            self._doubted.pop((stored.group, block_hash), None)
            if self._index is not None and stored.group == self.indexed_group:
                self._index.add(block_hash)

    def doubt(self, group: int, block_hash: bytes) -> None:
        """Takes in that a load has not found a block, and leaves it out for a while. If it is gone, the executor
        reports that; if the disk was too slow, it is there."""
        self._expected.pop((group, block_hash), None)
        self._doubted.pop((group, block_hash), None)
        self._doubted[group, block_hash] = time.monotonic() + _DOUBT_S

    def trust_again(self) -> None:
        """Takes in that time has passed. Call it before a search."""
        now = time.monotonic()
        while self._doubted and next(iter(self._doubted.values())) <= now:
            del self._doubted[next(iter(self._doubted))]

    def drop(self, group: int, block_hash: bytes) -> None:
        """Removes a block from all tiers."""
        for held in self._held.values():
            held[group].discard(block_hash)
        self._expected.pop((group, block_hash), None)
        self._unlist(group, block_hash)

    def clear(self) -> None:
        """Removes all blocks."""
        self._expected.clear()
        self._doubted.clear()
        for kind in self._held:
            self._clear(kind)

    def _clear(self, kind: int) -> None:
        for group, held in enumerate(self._held[kind]):
            hashes = list(held)
            held.clear()
            for block_hash in hashes if group == self.indexed_group else ():
                self._unlist(group, block_hash)

    def _unlist(self, group: int, block_hash: bytes) -> None:
        is_held = any(block_hash in held[group] for held in self._held.values())
        if self._index is not None and group == self.indexed_group and not is_held:
            self._index.remove(block_hash)
