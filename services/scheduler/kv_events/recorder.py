"""Records what the prefix cache of one replica holds, and what changes in it."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from pagewire.services.scheduler.memory.kv_cache import KVCacheManager
from pagewire.services.scheduler.values.block_hashes import ROOT_HASH
from pagewire.services.scheduler.values.request import Request
from pagewire.v1.admin_pb2 import KvEventsExecutor


class Origin(NamedTuple):
    """The properties of requests that may share blocks, besides their tokens."""

    namespace: bytes = b""  # empty: no tenant, salt or adapter
    adapter_digest: str = ""


class StoredBlock(NamedTuple):
    """The contents of a findable block."""

    block_hash: bytes
    parent: bytes  # its hash; empty: it has none, or it is unknown
    token_ids: Sequence[int]  # empty: unknown
    extra_keys: bytes
    origin: Origin


class Stored(NamedTuple):
    group: int
    block: StoredBlock


class Removed(NamedTuple):
    group: int
    block_hash: bytes


class Cleared(NamedTuple):
    """All blocks are forgotten."""


Change = Stored | Removed | Cleared


class _GroupListener:
    """Listens to the pool of one group."""

    def __init__(self, recorder: "Recorder", group: int) -> None:
        self._remove = recorder.remove
        self._group = group

    def add(self, block_hash: bytes) -> None:
        """Does nothing: `Recorder.stored` is called right after it, and knows the contents."""

    def remove(self, block_hash: bytes) -> None:
        self._remove(self._group, block_hash)


class Recorder:
    """Knows the findable blocks of one memory, from now on, and keeps the changes until they are taken."""

    def __init__(
        self,
        executor: KvEventsExecutor,
        kv: KVCacheManager,
        requests: Iterable[Request],
        on_change: Callable[["Recorder"], None],
    ) -> None:
        """requests: live ones; their tokens tell what present blocks hold. on_change: called with the first change
        after `take`."""
        self.executor = executor
        self.kv = kv
        self.found: list[dict[bytes, StoredBlock]] = [{} for _ in kv.groups]
        self._ratios = [group.block_size // kv.block_size for group in kv.groups]
        self._changes: list[Change] = []
        self._on_change = on_change
        self._fill(requests)
        kv.recorder = self
        for number, group in enumerate(kv.groups):
            group.pool.indexes += (_GroupListener(self, number),)

    def _fill(self, requests: Iterable[Request]) -> None:
        """Takes in the blocks that are findable already."""
        known: list[dict[bytes, StoredBlock]] = [{} for _ in self.found]
        for request in requests:
            if request.blocks.hashed_for == self.executor.weights_version:
                num_blocks = len(request.blocks.hashes)
                for number, blocks in enumerate(known):
                    blocks |= {one.block_hash: one for one in self._blocks(number, request, 0, num_blocks)}
        for number, group in enumerate(self.kv.groups):
            for block_hash in group.pool.hashes:
                unknown = StoredBlock(block_hash, b"", (), b"", Origin())
                self.found[number][block_hash] = known[number].get(block_hash, unknown)

    def _blocks(self, group: int, request: Request, start: int, end: int) -> Iterable[StoredBlock]:
        """Yields the blocks of a group that end within blocks `start` to `end - 1` of the request."""
        ratio, size, hashes = self._ratios[group], self.kv.groups[group].block_size, request.blocks.hashes
        root = request.blocks.root_hash
        origin = Origin(b"" if root == ROOT_HASH else root, request.adapter_digest)
        for i in range(start // ratio, end // ratio):
            yield StoredBlock(
                hashes[(i + 1) * ratio - 1],
                hashes[i * ratio - 1] if i else b"",
                array("i", request.token_ids[i * size : (i + 1) * size]),
                request.images.keys(i * size, (i + 1) * size) if request.images.images else b"",
                origin,
            )

    # -- changes -----------------------------------------------------------------------------------------------------

    def stored(self, request: Request, start: int, end: int, group: int | None = None) -> None:
        """Takes in that blocks of a request are findable; see `BlockRecorder`."""
        for number, found in enumerate(self.found):
            for block in self._blocks(number, request, start, end) if group in (None, number) else ():
                if block.block_hash not in found:  # otherwise another request's block is the one that is found
                    found[block.block_hash] = block
                    self._note(Stored(number, block))

    def remove(self, group: int, block_hash: bytes) -> None:
        if self.found[group].pop(block_hash, None) is not None:
            self._note(Removed(group, block_hash))

    def clear(self) -> None:
        """Takes in that all blocks are forgotten."""
        for found in self.found:
            found.clear()
        self._changes.clear()
        self._note(Cleared())

    def take(self) -> list[Change]:
        """Returns the changes since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def _note(self, change: Change) -> None:
        if not self._changes:
            self._on_change(self)
        self._changes.append(change)
