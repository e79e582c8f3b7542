"""The blocks of the KV cache: free blocks, the number of requests that hold each block, and findable contents.

A block without holders keeps its contents and its hash until it is reused: the free queue, in the order of eviction, is
also the prefix cache.
"""

import enum
from collections.abc import Collection, Iterator

from pagewire.services.scheduler.memory.block_index import BlockListener
from pagewire.services.scheduler.values.blocks import Block


class BlockState(enum.IntEnum):
    """Numbered as KVBlockState."""

    FREE = 1
    CACHED = 2  # free, with contents that can be found
    USED = 3
    SHARED = 4  # with several holders


def _state(block: Block) -> BlockState:
    if block.ref_count:
        return BlockState.SHARED if block.ref_count > 1 else BlockState.USED
    return BlockState.FREE if block.block_hash is None else BlockState.CACHED


class FreeQueue:
    """Free blocks as a doubly linked list through the blocks themselves: a prefix hit leaves the middle in O(1).

    A sentinel closes the ring: sentinel.next is the first to be reused, sentinel.prev the last.
    """

    def __init__(self) -> None:
        self._sentinel = Block(-1)
        self._sentinel.prev = self._sentinel.next = self._sentinel
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Block]:
        block = self._sentinel.next
        while block is not self._sentinel:
            assert block is not None
            yield block
            block = block.next

    def append(self, block: Block) -> None:
        """Adds a block to be reused last."""
        self._insert_before(self._sentinel, block)

    def prepend(self, block: Block) -> None:
        """Adds a block to be reused first."""
        assert self._sentinel.next is not None
        self._insert_before(self._sentinel.next, block)

    def pop(self) -> Block:
        """Removes and returns the block to be reused first; the queue must not be empty."""
        block = self._sentinel.next
        assert block is not None and block is not self._sentinel
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        assert block.prev is not None and block.next is not None
        block.prev.next = block.next
        block.next.prev = block.prev
        block.prev = block.next = None
        self._size -= 1

    def _insert_before(self, following: Block, block: Block) -> None:
        assert following.prev is not None
        block.prev, block.next = following.prev, following
        following.prev.next = block
        following.prev = block
        self._size += 1


class BlockPool:
    """Reference-counted blocks with a hash index over their contents."""

    def __init__(self, num_blocks: int) -> None:
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free = FreeQueue()
        for block in self._blocks:
            self._free.append(block)
        self._by_hash: dict[bytes, Block] = {}
        self.indexes: tuple[BlockListener, ...] = ()  # kept up to date with the findable blocks
        self.num_cached_blocks = 0  # free, with contents that can be found
        self.num_shared_blocks = 0  # with several holders

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks without holders, with or without cached contents."""
        return len(self._free)

    @property
    def hashes(self) -> Collection[bytes]:
        """The hashes of all findable contents."""
        return self._by_hash.keys()

    def find(self, block_hash: bytes) -> Block | None:
        return self._by_hash.get(block_hash)

    def acquire(self, block: Block) -> None:
        """Adds a holder to a block found by hash."""
        if block.ref_count == 0:
            self._free.remove(block)
            self.num_cached_blocks -= 1
        elif block.ref_count == 1:
            self.num_shared_blocks += 1
        block.ref_count += 1

    def allocate(self) -> Block:
        """Takes the free block to be reused first, and evicts its contents; there must be a free block."""
        block = self._free.pop()
        if block.block_hash is not None:
            del self._by_hash[block.block_hash]
            for index in self.indexes:
                index.remove(block.block_hash)
            block.block_hash = None
            self.num_cached_blocks -= 1
        block.ref_count = 1
        return block

    def register(self, block: Block, block_hash: bytes) -> None:
        """Makes a full block findable, unless a block with the same contents already is."""
        if block_hash not in self._by_hash:
            self._by_hash[block_hash] = block
            block.block_hash = block_hash
            for index in self.indexes:
                index.add(block_hash)

    def forget(self, block_hash: bytes) -> None:
        """Removes contents from the hash index; requests that hold the block keep it."""
        block = self._by_hash.pop(block_hash, None)
        if block is not None:
            block.block_hash = None
            self.num_cached_blocks -= block.ref_count == 0
            for index in self.indexes:
                index.remove(block_hash)

    def release(self, block_table: list[Block]) -> None:
        """Drops one holder of each block. Tails are evicted before the prefixes that lead to them; blocks without
        findable contents are reused before all others."""
        for block in reversed(block_table):
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.block_hash is None:
                    self._free.prepend(block)
                else:
                    self._free.append(block)
                    self.num_cached_blocks += 1
            elif block.ref_count == 1:
                self.num_shared_blocks -= 1

    def states(self, every: int) -> list[BlockState]:
        """Returns the states of every `every`-th block, in the order of their ids."""
        return [_state(block) for block in self._blocks[::every]]
