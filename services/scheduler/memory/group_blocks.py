"""The blocks of one group of layers: a pool, and the blocks that requests hold and find in it."""

from collections.abc import Sequence

from pagewire.services.scheduler.memory.block_pool import BlockPool
from pagewire.services.scheduler.values.blocks import Block, HeldBlocks
from pagewire.services.scheduler.values.executor_info import KVGroup

# Share of the blocks that an admission leaves free while others run, so that it does not cause a preemption at once.
WATERMARK = 0.01


class GroupBlocks:
    """The blocks of one group. With a window w, the token at position p reads the tokens from p - w + 1 on: the request
    does not keep earlier blocks, and a prefix hit does not need them."""

    def __init__(self, group: KVGroup, block_size: int, max_num_batched_tokens: int) -> None:
        self.pool = BlockPool(group.num_blocks)
        self.window = group.window
        self.is_state = group.is_state
        self.block_size = block_size
        self._max_chunk = max_num_batched_tokens
        self._watermark = int(group.num_blocks * WATERMARK)

    def start_step(self) -> None:
        """Prepares the decision of a step."""

    def end_of(self, num_tokens: int) -> int:
        """Returns the length of the block table of num_tokens tokens."""
        return -(-num_tokens // self.block_size)

    def first_needed(self, position: int) -> int:
        """Returns the index in the block table of the first block that tokens from this position on read."""
        return max(0, position - self.window + 1) // self.block_size if self.window else 0

    def longest_hit(self, hashes: Sequence[bytes], most: int) -> int:
        """Returns the largest number of leading blocks, up to `most`, after which a request can continue with contents
        of the pool."""
        if not self.window:
            return next((i for i in range(most) if self.find_block(hashes[i]) is None), most)
        num_blocks = most
        while num_blocks > 0:
            first = self.first_needed(num_blocks * self.block_size)
            places = range(num_blocks - 1, first - 1, -1)
            missing = next((i for i in places if self.find_block(hashes[i]) is None), None)
            if missing is None:
                break
            num_blocks = missing  # all longer hits need it
        return num_blocks

    def find(self, hashes: Sequence[bytes], num_blocks: int) -> HeldBlocks:
        """Returns those of the first `num_blocks` blocks, a hit, that are still read; they are not held yet."""
        first = self.first_needed(num_blocks * self.block_size)
        found = [self.find_block(hashes[i]) for i in range(first, num_blocks)]
        return HeldBlocks(first, [block for block in found if block is not None])

    def keys(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Returns the hashes of a request under which blocks of this group are found."""
        return hashes

    @property
    def num_admissible_blocks(self) -> int:
        """The number of blocks that a new request may take while others run."""
        return self.pool.num_free_blocks - self._watermark

    def find_block(self, block_hash: bytes) -> Block | None:
        """Returns the block with these contents, which may be read from the next step on."""
        return self.pool.find(block_hash)

    def cache(self, held: HeldBlocks, hashes: Sequence[bytes], start: int, end: int) -> None:
        """Makes a request's full blocks with indices start to end - 1 findable."""
        for i in range(start, end):
            self.pool.register(held.blocks[i - held.first], hashes[i])

    def num_missing(self, num_tokens: int, hit: HeldBlocks, keep_free: bool) -> int:
        """Returns how many blocks would have to be freed before `admit` succeeds."""
        num_needed = self._end_of_admission(num_tokens, hit) - hit.end
        # Hits without holders are in the free queue, which they leave.
        num_needed += sum(block.ref_count == 0 for block in hit.blocks)
        return num_needed + (self._watermark if keep_free else 0) - self.pool.num_free_blocks

    def admit(self, num_tokens: int, hit: HeldBlocks) -> None:
        """Reserves the hit and the blocks after it for a request of num_tokens tokens; see `KVCacheManager.admit`."""
        for block in hit.blocks:
            self.pool.acquire(block)
        self.extend(hit, self._end_of_admission(num_tokens, hit) - hit.end)

    def _end_of_admission(self, num_tokens: int, hit: HeldBlocks) -> int:
        if self.window:
            num_tokens = min(num_tokens, hit.end * self.block_size + self._max_chunk)
        return self.end_of(num_tokens)

    def extend(self, held: HeldBlocks, count: int) -> list[int]:
        """Appends free blocks, of which there must be enough; returns their ids."""
        blocks = [self.pool.allocate() for _ in range(count)]
        held.blocks += blocks
        held.end += count
        return [block.block_id for block in blocks]

    def release_behind(self, held: HeldBlocks, position: int) -> None:
        """Releases the blocks that are not read by tokens from this position on."""
        count = self.first_needed(position) - held.first
        if count > 0:
            self.release(held.blocks[:count])
            del held.blocks[:count]
            held.first += count

    def release(self, blocks: list[Block]) -> None:
        """Releases blocks of a request; earlier ones in the table are evicted later."""
        self.pool.release(blocks)
