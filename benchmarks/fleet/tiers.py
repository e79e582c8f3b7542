"""Simulated tiers of KV memory: what they hold, and the time that loads from them take."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.fleet.timeline import Timeline
from pagewire.services.scheduler.core.replica import Replica
from pagewire.services.scheduler.tiers.contents import HASH_BYTES, TierContents
from pagewire.v1.executor_pb2 import BlockHashes, KVLoad, KVLoaded, KVTier, KVTierBytes, KVTierKind, TierChanges


@dataclass(frozen=True)
class TierKind:
    """The hardware of a tier, stated and not measured here."""

    kind: KVTierKind
    bytes_per_second: float
    latency: float  # seconds, of each load


HOST = TierKind(KVTierKind.KV_TIER_KIND_HOST, 40e9, 0.0005)  # pinned memory over PCIe 5: 63 GB/s by its data sheet
DISK = TierKind(KVTierKind.KV_TIER_KIND_DISK, 6e9, 0.002)  # one NVMe drive of PCIe 4
KINDS = {"host": HOST, "disk": DISK}


@dataclass
class Store:
    """Holds the blocks of a tier, which executors may share, and tells the schedulers' indices that follow it."""

    kind: TierKind
    block_bytes: int
    max_blocks: int
    blocks: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # by hash, the one used longest ago first
    followers: list[TierContents] = field(default_factory=list)

    def description(self, name: str) -> KVTier:
        return KVTier(
            kind=self.kind.kind,
            bytes=self.max_blocks * self.block_bytes,
            store=name,
            load_rate=self.kind.bytes_per_second,
            load_latency=self.kind.latency,
        )

    def has(self, block_hash: bytes) -> bool:
        """Returns whether a block is there, and counts as a use of it."""
        if block_hash in self.blocks:
            self.blocks.move_to_end(block_hash)
            return True
        return False

    def save(self, hashes: Sequence[bytes]) -> None:
        new = [one for one in hashes if not self.has(one)]
        self.blocks.update(dict.fromkeys(new))
        gone = [self.blocks.popitem(last=False)[0] for _ in range(len(self.blocks) - self.max_blocks)]
        self._tell(stored=[BlockHashes(hashes=b"".join(new))] if new else (), removed=_message(gone))

    def forget(self, hashes: Sequence[bytes] | None) -> None:
        """Removes blocks; None: all."""
        gone = [one for one in (list(self.blocks) if hashes is None else hashes) if one in self.blocks]
        for one in gone:
            del self.blocks[one]
        self._tell(removed=_message(gone))

    def follow(self, contents: TierContents) -> None:
        self.followers.append(contents)
        contents.apply(TierChanges(kind=self.kind.kind, stored=_message(list(self.blocks)), is_complete=True))

    def _tell(self, stored: Sequence[BlockHashes] = (), removed: Sequence[BlockHashes] = ()) -> None:
        if stored or removed:
            changes = TierChanges(kind=self.kind.kind, stored=stored, removed=removed)
            for contents in self.followers:
                contents.apply(changes)


def _message(hashes: Sequence[bytes]) -> Sequence[BlockHashes]:
    return [BlockHashes(hashes=b"".join(hashes))] if hashes else ()


class StoreCalls:
    """The calls about a store, as the scheduler makes them to an executor."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._contents: TierContents | None = None

    def watch(self, contents: TierContents) -> None:
        self._contents = contents
        self._store.follow(contents)

    def forget(self, blocks: Sequence[BlockHashes] | None, on_forgotten: Callable[[], None], reset_at: int = 0) -> None:
        self._store.forget(None if blocks is None else [one for some in blocks for one in split(some.hashes)])
        on_forgotten()

    def stop(self) -> None:
        self._store.followers = [one for one in self._store.followers if one is not self._contents]


@dataclass
class Loader:
    """The loads and saves of one executor: loads go one after the other over its link."""

    timeline: Timeline
    replica: Replica
    block_bytes: int
    store: Store | None  # its own; None: it has none
    sources: dict[str, Store]  # of other executors, by address
    wake: Callable[[], None]
    num_loaded_blocks: int = 0
    _free: float = 0.0  # when its link is

    def save(self, hashes: Iterator[bytes]) -> None:
        if self.store is not None:
            self.store.save(list(hashes))

    def begin(self, load: KVLoad, start: float, is_current: Callable[[], bool]) -> None:
        """Begins a load that cannot begin before `start`. is_current: whether the stream of the load goes on."""
        store = self.sources.get(load.source) if load.source else self.store
        hashes = [one for some in load.blocks for one in split(some.hashes)]
        kind = HOST if store is None else store.kind
        num_found = sum(store is not None and one in store.blocks for one in hashes)
        began = max(start, self._free)
        self._free = began + kind.latency + num_found * self.block_bytes / kind.bytes_per_second
        self.timeline.at(self._free, self._end, load, hashes, store, self._free - start, is_current)

    def _end(
        self, load: KVLoad, hashes: Sequence[bytes], store: Store | None, seconds: float, is_current: Callable[[], bool]
    ) -> None:
        if not is_current():
            return
        missing = [index for index, one in enumerate(hashes) if store is None or not store.has(one)]
        num_loaded = len(hashes) - len(missing)
        self.num_loaded_blocks += num_loaded
        loaded = KVLoaded(load_id=load.load_id, missing=missing, seconds=seconds)
        if store is not None and num_loaded:
            loaded.bytes.append(KVTierBytes(kind=store.kind.kind, bytes=num_loaded * self.block_bytes))
        assert self.replica.kv.tiers is not None
        self.replica.kv.tiers.end_loads([loaded])
        self.wake()


def split(hashes: bytes) -> Iterator[bytes]:
    """Yields hashes that are concatenated."""
    for start in range(0, len(hashes), HASH_BYTES):
        yield hashes[start : start + HASH_BYTES]
