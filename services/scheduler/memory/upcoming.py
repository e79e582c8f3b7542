"""Prefixes in the making: a request waits for a block that another one computes instead of computing it, too.

Most blocks can be found in the step that computes them. Not so the rest of a prompt that takes several steps, a state
(from the next step on), and the blocks of a prompt with images (once the executor has accepted them). Whoever waits
has the same next block as a request that runs, so it waits for steps that are taken anyway, and no longer than that one
runs with blocks of theirs that nobody can find yet: not after it was preempted, aborted or lost.
"""

from bisect import bisect_left

from pagewire.services.scheduler.values.request import Request


class UpcomingBlocks:
    """Which blocks will be found next in the KV cache of a replica."""

    def __init__(self, block_size: int, num_blocks_at_once: int) -> None:
        """num_blocks_at_once: a hit ends at a multiple of so many."""
        self._block_size = block_size
        self._at_once = num_blocks_at_once
        self._makers: set[Request] = set()
        self._next: dict[bytes, Request] = {}  # hash up to the end of what comes next -> who computes it

    def start_step(self) -> None:
        """A step is about to be decided: what the last one has computed can be found."""
        if self._makers:
            makers, self._makers = self._makers, set()
            self._next.clear()
            for request in makers:
                self.announce(request)

    def announce(self, request: Request) -> None:
        """More blocks of a running request can be found, or none yet: notes what follows them."""
        end = (request.num_cached_blocks // self._at_once + 1) * self._at_once
        if end <= len(request.block_hashes) and request.held_blocks:
            self._next.setdefault(request.block_hashes[end - 1], request)
            self._makers.add(request)

    def keeps_waiting(self, request: Request) -> bool:
        """Whether the request waits and whom it waits for has not come to the end of what they share."""
        if request.awaited is None:
            return False
        maker, num_blocks = request.awaited
        return maker in self._makers and bool(maker.held_blocks) and maker.num_cached_blocks < num_blocks

    def is_awaited_by(self, request: Request, num_found_blocks: int) -> bool:
        """Whether a request of which so many blocks are found should wait for more; noted in `request.awaited`."""
        request.awaited = None
        end = num_found_blocks + self._at_once
        if not self._next or end * self._block_size >= request.num_tokens:
            return False
        maker = self._next.get(request.block_hashes[end - 1])
        if maker is None or not maker.held_blocks:
            return False
        ours, theirs = request.block_hashes, maker.block_hashes
        most = min((request.num_tokens - 1) // self._block_size, len(theirs))
        num_shared = bisect_left(range(most), True, lo=end, key=lambda i: ours[i] != theirs[i])
        request.awaited = maker, num_shared // self._at_once * self._at_once
        return True
