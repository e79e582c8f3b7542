"""The group of layers that represents a replica in comparisons, and its entries in the index of all replicas."""

from collections.abc import Iterable, Sequence

from pagewire.services.scheduler.memory.block_index import BlockIndex
from pagewire.services.scheduler.memory.group_blocks import GroupBlocks
from pagewire.services.scheduler.values.request import Request


class IndexedGroup:
    """A group that keeps all tokens, if there is one, because the other groups have to agree with it on a prefix."""

    def __init__(self, groups: Sequence[GroupBlocks], index: BlockIndex | None) -> None:
        """groups: all groups of one replica, at least one. index: None without an index."""
        self._group = next((group for group in groups if not group.window), groups[0])
        self._index: BlockIndex | None = None
        if index is not None:
            self.share(index)

    def share(self, index: BlockIndex) -> None:
        """Keeps the index up to date with the blocks of this replica that are findable, now or once running requests
        compute them."""
        self._index = index
        self._group.pool.indexes += (index,)
        for block_hash in self._group.pool.hashes:
            index.add(block_hash)

    def leave(self, running: Iterable[Request]) -> None:
        """Removes all contents from the index, including those that running requests were going to compute."""
        if self._index is not None:
            self._index.remove_all(list(self._group.pool.hashes))
            self.forget(running)
            self._group.pool.indexes = tuple(one for one in self._group.pool.indexes if one is not self._index)
            self._index = None

    def forget(self, running: Iterable[Request]) -> None:
        """Removes the contents that running requests hold or are going to compute."""
        if self._index is not None:
            for request in running:
                self._index.remove_all(self._group.keys(request.blocks.hashes))

    def expect(self, request: Request) -> None:
        """Adds the contents that a request is going to compute."""
        if self._index is not None:
            for block_hash in self._group.keys(request.blocks.hashes):
                self._index.add(block_hash)

    def stop_expecting(self, request: Request) -> None:
        """Removes the contents of a request that were not computed."""
        if self._index is not None:
            for block_hash in self._group.keys(request.blocks.hashes):
                if self._group.pool.find(block_hash) is None:
                    self._index.remove(block_hash)

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Raises AssertionError unless the index has exactly the findable contents of this replica and some that these
        requests will compute."""
        if self._index is None:
            return
        known, present = self._index.hashes(), set(self._group.pool.hashes)
        assert present <= known, "the index lacks a block"
        expected = {block_hash for request in running for block_hash in self._group.keys(request.blocks.hashes)}
        assert known <= present | expected, "the index has an evicted block"

    def keys(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Returns the hashes of a request that are in the index, if there is one."""
        return self._group.keys(hashes) if self._index is not None else ()

    @property
    def block_size(self) -> int:
        """The number of tokens in a block."""
        return self._group.block_size

    def num_lacking(self, num_tokens: int, num_cached: int) -> int:
        """Returns the number of blocks that a request lacks when `num_cached` of its tokens are found; 0 if no group
        keeps all tokens, as rows are the bound then."""
        if self._group.window:
            return 0
        return -(-num_tokens // self._group.block_size) - num_cached // self._group.block_size

    def is_held(self, block_hash: bytes) -> bool:
        """Returns whether running requests hold a block with these contents or will compute it."""
        block = self._group.pool.find(block_hash)
        return block is None or block.ref_count > 0

    @property
    def num_admissible(self) -> int:
        """The number of blocks that a new request may take while others run."""
        return self._group.num_admissible_blocks
