"""Prefixes that can be continued with the KV cache and saved blocks together."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy

from pagewire.services.scheduler.memory.block_pool import BlockPool
from pagewire.services.scheduler.memory.group_blocks import GroupBlocks
from pagewire.services.scheduler.memory.prefix_hit import longest_hit
from pagewire.services.scheduler.values.blocks import Block, HeldBlocks

# Returns whether a block of a group, with this hash, can be loaded.
IsSaved = Callable[[int, bytes], bool]
# Blocks that are being filled, by group and hash.
Filling = Mapping[tuple[int, bytes], Block]

# Stands for any saved block in the results of a search. It counts as a block that leaves the free queue.
SAVED = Block(-1)


class _Reachable(BlockPool):
    """Finds the blocks of a pool, and `SAVED` for those that can be loaded."""

    def __init__(self, pool: BlockPool, group: int, is_saved: IsSaved, filling: Filling) -> None:
        super().__init__(0)
        self._pool = pool
        self._group = group
        self._is_saved = is_saved
        self._filling = filling

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free_blocks

    def find(self, block_hash: bytes) -> Block | None:
        found = self._pool.find(block_hash) or self._filling.get((self._group, block_hash))
        return SAVED if found is None and self._is_saved(self._group, block_hash) else found


class Reach:
    """The groups of one executor, as if all saved blocks were in the KV cache, and those that are being filled."""

    def __init__(self, groups: Sequence[GroupBlocks], is_saved: IsSaved, filling: Filling) -> None:
        self._groups = []
        for number, group in enumerate(groups):
            reaching = copy(group)
            reaching.pool = _Reachable(group.pool, number, is_saved, filling)
            self._groups.append(reaching)

    def longest(self, hashes: Sequence[bytes], most: int) -> int:
        """Returns the largest number of leading blocks, up to `most`, after which a request could continue."""
        return longest_hit(self._groups, hashes, most)

    def tables(self, hashes: Sequence[bytes], num_blocks: int) -> list[HeldBlocks]:
        """Returns, by group, the blocks that a request needs to continue after `num_blocks` blocks; `SAVED` stands for
        those to load."""
        return [group.find(hashes, num_blocks) for group in self._groups]

    def fits(self, tables: Sequence[HeldBlocks], num_tokens: int) -> bool:
        """Returns whether a request of `num_tokens` tokens has room with these tables, without a preemption."""
        return all(
            group.num_missing(num_tokens, table, keep_free=True) <= 0
            for group, table in zip(self._groups, tables, strict=True)
        )
