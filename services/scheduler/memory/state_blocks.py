"""The blocks of a group of layers with a state of constant size, which represents all tokens so far.

A block covers `state_tokens` tokens and holds the state after the last computed one. Within these tokens, each step of
the request overwrites the state. After them, the block no longer changes and is findable by the hash of all tokens up
to its end: prefix hits end at the end of such a block.

A token reads only the state after the previous token. To `GroupBlocks` that is a window of two tokens.
"""

from collections.abc import Sequence
from dataclasses import replace

from pagewire.services.scheduler.memory.group_blocks import GroupBlocks
from pagewire.services.scheduler.values.blocks import Block, HeldBlocks
from pagewire.services.scheduler.values.executor_info import KVGroup


class StateBlocks(GroupBlocks):
    """State blocks of one group. Parameters and results count blocks of the other groups, except in `HeldBlocks`."""

    def __init__(self, group: KVGroup, block_size: int, max_num_batched_tokens: int) -> None:
        super().__init__(replace(group, window=2), group.state_tokens, max_num_batched_tokens)
        self._ratio = group.state_tokens // block_size
        self._written: set[Block] = set()  # by the present step, or made findable since

    def start_step(self) -> None:
        self._written.clear()

    def find_block(self, block_hash: bytes) -> Block | None:
        """Returns None for an unknown block, and for one that the present step writes: requests run concurrently, and
        one of them would read a state that another has not written yet. (Keys and values of a layer are all written
        before any is read.)"""
        block = super().find_block(block_hash)
        return None if block in self._written else block

    def keys(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        return self._at_ends(hashes)

    def longest_hit(self, hashes: Sequence[bytes], most: int) -> int:
        return super().longest_hit(self._at_ends(hashes), most // self._ratio) * self._ratio

    def find(self, hashes: Sequence[bytes], num_blocks: int) -> HeldBlocks:
        return super().find(self._at_ends(hashes), num_blocks // self._ratio)

    def cache(self, held: HeldBlocks, hashes: Sequence[bytes], start: int, end: int) -> None:
        start, end = start // self._ratio, end // self._ratio
        super().cache(held, self._at_ends(hashes), start, end)
        self._written.update(held.blocks[i - held.first] for i in range(start, end))

    def release(self, blocks: list[Block]) -> None:
        """Releases blocks. The latest is evicted last, because the next turn of a conversation needs only that one."""
        super().release(blocks[::-1])

    def _at_ends(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Returns the hashes of all tokens up to the end of each state's block."""
        return hashes[self._ratio - 1 :: self._ratio]
