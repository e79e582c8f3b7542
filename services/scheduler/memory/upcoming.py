"""Upcoming prefixes: a request waits for a block that another request computes, instead of computing it, too.

Most blocks are findable in the step that computes them. The exceptions are the rest of a prompt that takes several
steps, a state (found from the next step on), and the blocks of a prompt with images (found once the executor has
accepted them). A waiting request has the same next block as a running one, so it waits for steps that are executed
anyway, and only while that request runs and has blocks that cannot be found yet: not after it was preempted, aborted or
lost.
"""

from bisect import bisect_left

from pagewire.services.scheduler.values.blocks import RequestBlocks
from pagewire.services.scheduler.values.request import Request


class UpcomingBlocks:
    """The blocks that become findable next in the KV cache of a replica."""

    def __init__(self, block_size: int, num_blocks_at_once: int) -> None:
        """num_blocks_at_once: a hit ends at a multiple of this number of blocks."""
        self._block_size = block_size
        self._at_once = num_blocks_at_once
        self._makers: set[RequestBlocks] = set()
        # Hash at the end of the next blocks -> blocks of the request that computes them.
        self._next: dict[bytes, RequestBlocks] = {}

    def start_step(self) -> None:
        """Prepares the decision of a step: blocks that the last step computed are findable now."""
        if self._makers:
            makers, self._makers = self._makers, set()
            self._next.clear()
            for blocks in makers:
                self.announce(blocks)

    def announce(self, blocks: RequestBlocks) -> None:
        """Announces the next blocks of a running request, after its findable ones."""
        end = (blocks.num_cached // self._at_once + 1) * self._at_once
        if end <= len(blocks.hashes) and blocks.held:
            self._next.setdefault(blocks.hashes[end - 1], blocks)
            self._makers.add(blocks)

    def keeps_waiting(self, request: Request) -> bool:
        """Returns whether the request waits for blocks that have not all been computed."""
        if request.blocks.awaited is None:
            return False
        awaited, num_blocks = request.blocks.awaited
        return awaited in self._makers and bool(awaited.held) and awaited.num_cached < num_blocks

    def is_awaited_by(self, request: Request, num_found_blocks: int) -> bool:
        """Returns whether a request with a hit of `num_found_blocks` should wait for more; sets `awaited` if so."""
        blocks = request.blocks
        blocks.awaited = None
        end = num_found_blocks + self._at_once
        if not self._next or end * self._block_size >= request.num_tokens:
            return False
        upcoming = self._next.get(blocks.hashes[end - 1])
        if upcoming is None or not upcoming.held:
            return False
        ours, theirs = blocks.hashes, upcoming.hashes
        most = min((request.num_tokens - 1) // self._block_size, len(theirs))
        num_shared = bisect_left(range(most), True, lo=end, key=lambda i: ours[i] != theirs[i])
        blocks.awaited = upcoming, num_shared // self._at_once * self._at_once
        return True
