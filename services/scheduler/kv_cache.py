"""KV memory of requests: block tables over the pool, and prefix hits."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from pagewire.services.scheduler.block_pool import ROOT_HASH, Block, BlockPool, hash_block
from pagewire.services.scheduler.request import Request

NO_BLOCKS: list[int] = []

# Share of the blocks that an admission leaves free while others run, so that it does not cause a preemption at once.
WATERMARK = 0.01


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """A prefix hit: blocks that hold the KV of a request's first num_tokens tokens."""

    blocks: tuple[Block, ...]
    num_tokens: int


NOTHING_COMPUTED = ComputedBlocks((), 0)


class KVCacheManager:
    """Gives requests the blocks their tokens need and finds blocks that already hold their KV."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.block_size = block_size
        self._enable_prefix_caching = enable_prefix_caching
        self._pool = BlockPool(num_blocks)
        self._watermark = int(num_blocks * WATERMARK)
        self._refused: Request | None = None  # by find_room, when so many blocks were free
        self._num_free_at_refusal = 0

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free_blocks

    def get_computed_blocks(self, request: Request) -> ComputedBlocks:
        """The longest cached prefix of the request, at most all tokens but the last: that one must be computed to
        sample the next."""
        if not self._enable_prefix_caching:
            return NOTHING_COMPUTED
        blocks: list[Block] = []
        num_blocks = (request.num_tokens - 1) // self.block_size
        for block_hash in islice(self._hashes(request, num_blocks), num_blocks):
            block = self._pool.find(block_hash)
            if block is None:
                break
            blocks.append(block)
        return ComputedBlocks(tuple(blocks), len(blocks) * self.block_size)

    def num_missing_blocks(self, request: Request, computed: ComputedBlocks, keep_free: bool = False) -> int:
        """How many blocks would have to be freed before `admit` succeeds; 0 or less: it does now."""
        num_needed = -(-request.num_tokens // self.block_size) - len(computed.blocks)
        # Hits that nobody holds are in the free queue and leave it.
        num_needed += sum(block.ref_count == 0 for block in computed.blocks)
        return num_needed + (self._watermark if keep_free else 0) - self._pool.num_free_blocks

    def find_room(self, request: Request, others_run: bool) -> ComputedBlocks | None:
        """The prefix hit to `admit` a waiting request with, or None if blocks lack.

        Where others run, who was refused is refused again until a block comes free, without looking a long prompt up
        in every step.
        """
        num_free_blocks = self._pool.num_free_blocks
        if others_run and request is self._refused and num_free_blocks <= self._num_free_at_refusal:
            self._num_free_at_refusal = num_free_blocks
            return None
        computed = self.get_computed_blocks(request)
        if self.num_missing_blocks(request, computed, keep_free=others_run) > 0:
            self._refused, self._num_free_at_refusal = request, num_free_blocks
            return None
        self._refused = None
        return computed

    def admit(self, request: Request, computed: ComputedBlocks) -> list[int]:
        """Gives a request that holds nothing the blocks of all its known tokens, so that later chunks of its prefill
        cannot run out of memory. `num_missing_blocks` must be 0 or less.

        Returns:
            The ids of its block table.
        """
        for block in computed.blocks:
            self._pool.acquire(block)
        num_blocks = -(-request.num_tokens // self.block_size)
        request.block_table = list(computed.blocks)
        request.block_table += [self._pool.allocate() for _ in range(num_blocks - len(computed.blocks))]
        request.num_cached_blocks = len(computed.blocks)
        return [block.block_id for block in request.block_table]

    def allocate_slots(self, request: Request, num_tokens: int) -> list[int] | None:
        """Extends the block table to hold num_tokens tokens beyond the computed ones.

        Returns:
            The ids of the blocks appended, or None if there are not enough and nothing was changed.
        """
        num_slots = request.num_computed_tokens + num_tokens
        num_new_blocks = -(-num_slots // self.block_size) - len(request.block_table)
        if num_new_blocks <= 0:
            return NO_BLOCKS
        if num_new_blocks > self._pool.num_free_blocks:
            return None
        blocks = [self._pool.allocate() for _ in range(num_new_blocks)]
        request.block_table += blocks
        return [block.block_id for block in blocks]

    def cache_blocks(self, request: Request) -> None:
        """Makes those blocks findable that are full, whose tokens are known and whose KV is computed in this step or an
        earlier one."""
        num_full = min(request.num_computed_tokens, len(request.token_ids)) // self.block_size
        if num_full <= request.num_cached_blocks or not self._enable_prefix_caching:
            return
        hashes = self._hashes(request, num_full)
        for i in range(request.num_cached_blocks, num_full):
            self._pool.register(request.block_table[i], hashes[i])
        request.num_cached_blocks = num_full

    def free(self, request: Request) -> None:
        """Takes everything from a request. Steps in flight may still write to its blocks: whoever gets them next runs
        in a later step, and steps execute in order."""
        self.cache_blocks(request)
        self._pool.release(request.block_table)
        request.block_table = []
        request.num_cached_blocks = 0

    def num_exclusive_blocks(self, request: Request) -> int:
        """Blocks that would become free with the request."""
        return sum(block.ref_count == 1 for block in request.block_table)

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raises AssertionError unless the pool is consistent and held by exactly these requests."""
        self._pool.check_integrity()
        held = Counter(block for request in requests for block in request.block_table)
        assert len(held) == self.num_blocks - self.num_free_blocks, "a block is held by nobody"
        assert all(block.ref_count == count for block, count in held.items()), "a ref_count is wrong"

    def _hashes(self, request: Request, num_blocks: int) -> list[bytes]:
        """Hashes of the request's first num_blocks blocks, at least; what was hashed once is kept."""
        hashes, size = request.block_hashes, self.block_size
        for i in range(len(hashes), num_blocks):
            token_ids = request.token_ids[i * size : (i + 1) * size]
            hashes.append(hash_block(hashes[-1] if hashes else ROOT_HASH, token_ids))
        return hashes
