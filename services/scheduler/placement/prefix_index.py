"""An index of the blocks of all replicas, which finds the prefix of a prompt that each replica holds without asking
it."""

from collections.abc import Collection, Iterable, Sequence


class PrefixIndex:
    """Maps hashes of blocks to the ids of the replicas that can find them, or will when running requests are
    computed."""

    def __init__(self) -> None:
        # Most blocks are on one replica: a set for each block would take several times the memory.
        self._holders: dict[bytes, int | set[int]] = {}

    def add(self, replica_id: int, block_hash: bytes) -> None:
        present = self._holders.get(block_hash)
        if present is None:
            self._holders[block_hash] = replica_id
        elif isinstance(present, set):
            present.add(replica_id)
        elif present != replica_id:
            self._holders[block_hash] = {present, replica_id}

    def remove(self, replica_id: int, block_hash: bytes) -> None:
        """Removes a block of a replica; does nothing if it is not in the index."""
        present = self._holders.get(block_hash)
        if present == replica_id:
            del self._holders[block_hash]
        elif isinstance(present, set):
            present.discard(replica_id)
            if len(present) == 1:
                (self._holders[block_hash],) = present

    def depths(self, hashes: Sequence[bytes], wanted: Collection[int], num_holders: int) -> dict[int, int]:
        """Returns how many of the first blocks with these hashes each replica holds, replicas with most first.

        Earlier blocks are evicted last, so a replica with a block is assumed to have all earlier ones, too.

        wanted: replicas to return if they hold any block. num_holders: the number of others to return, those with most.
        """
        found: dict[int, int] = {}
        missing = set(wanted)
        last: int | set[int] | None = None
        for place in range(len(hashes) - 1, -1, -1):
            present = self._holders.get(hashes[place])
            if present is None or present is last:
                continue
            last = present if isinstance(present, int) else None
            for replica_id in missing & present if isinstance(present, set) else missing & {present}:
                missing.discard(replica_id)
                found[replica_id] = place + 1
            for replica_id in () if num_holders <= 0 else present if isinstance(present, set) else (present,):
                if replica_id not in found:
                    num_holders -= 1
                    found[replica_id] = place + 1
                    if num_holders == 0:
                        break
            if not missing and num_holders <= 0:
                break
        return found

    def hashes_of(self, replica_id: int) -> set[bytes]:
        """Returns the hashes of the blocks of a replica, by a search through all blocks."""
        return {
            block_hash
            for block_hash, present in self._holders.items()
            if present == replica_id or (isinstance(present, set) and replica_id in present)
        }

    def __len__(self) -> int:
        return len(self._holders)


class IndexedBlocks:
    """One replica's part of the index."""

    __slots__ = ("_index", "_replica_id")

    def __init__(self, index: PrefixIndex, replica_id: int) -> None:
        self._index = index
        self._replica_id = replica_id

    def add(self, block_hash: bytes) -> None:
        self._index.add(self._replica_id, block_hash)

    def remove(self, block_hash: bytes) -> None:
        self._index.remove(self._replica_id, block_hash)

    def hashes(self) -> set[bytes]:
        """Returns the hashes of the blocks of the replica."""
        return self._index.hashes_of(self._replica_id)

    def remove_all(self, block_hashes: Iterable[bytes]) -> None:
        for block_hash in block_hashes:
            self._index.remove(self._replica_id, block_hash)
