"""KV memory of requests: block tables over the pools of all groups of layers, and prefix hits.

Each group has its own pool and block tables, and keeps the blocks that its `KVGroup` defines: those of all tokens,
those that a window still sees, or the latest state. A request has room for a token if every group has.
"""

from collections.abc import Iterable, Sequence

from pagewire.services.scheduler.memory.block_index import BlockIndex, BlockRecorder, BlockTiers
from pagewire.services.scheduler.memory.group_blocks import GroupBlocks
from pagewire.services.scheduler.memory.indexed_group import IndexedGroup
from pagewire.services.scheduler.memory.prefix_hit import longest_hit
from pagewire.services.scheduler.memory.state_blocks import StateBlocks
from pagewire.services.scheduler.memory.upcoming import UpcomingBlocks
from pagewire.services.scheduler.values.block_hashes import computed_root, hash_block
from pagewire.services.scheduler.values.blocks import ComputedBlocks, HeldBlocks, NewBlocks
from pagewire.services.scheduler.values.executor_info import KVGroup
from pagewire.services.scheduler.values.request import Request

# More tokens than any request has.
_NO_LIMIT = 1 << 62


class KVCacheManager:
    """Gives requests the blocks that their tokens need, and finds blocks that already hold their KV."""

    def __init__(
        self,
        groups: Sequence[KVGroup],
        block_size: int,
        enable_prefix_caching: bool,
        max_num_batched_tokens: int,
        weights_version: str = "",
        index: BlockIndex | None = None,
    ) -> None:
        """weights_version: of the weights that compute the blocks. index: is kept up to date with the replica's."""
        self._weights_version = weights_version
        self.block_size = block_size
        self.no_blocks = NewBlocks([0] * len(groups), [])
        self.caches_prefixes = enable_prefix_caching and bool(groups)
        self._groups = [
            (StateBlocks if group.is_state else GroupBlocks)(group, block_size, max_num_batched_tokens)
            for group in groups
        ]
        # Groups with windows or states release blocks while a request runs.
        self._windows = [(index, group) for index, group in enumerate(self._groups) if group.window]
        self.upcoming = UpcomingBlocks(
            block_size, max((group.state_tokens // block_size for group in groups if group.is_state), default=1)
        )
        self.indexed = IndexedGroup(self._groups, index if self.caches_prefixes else None) if groups else None
        self.recorder: BlockRecorder | None = None
        self.tiers: BlockTiers | None = None
        self._refused: Request | None = None  # the last request without room
        self._num_free_at_refusal: list[int] = []

    @property
    def num_blocks(self) -> int:
        """The number of blocks in all groups."""
        return sum(group.pool.num_blocks for group in self._groups)

    @property
    def num_free_blocks(self) -> int:
        """The number of free blocks in all groups."""
        return sum(group.pool.num_free_blocks for group in self._groups)

    @property
    def usage(self) -> float:
        """The share of blocks in use, 0 to 1, in the fullest group."""
        return max((1 - group.pool.num_free_blocks / group.pool.num_blocks for group in self._groups), default=0.0)

    @property
    def groups(self) -> Sequence[GroupBlocks]:
        """The groups, read-only."""
        return self._groups

    def has_free_blocks(self, count: int) -> bool:
        """Returns whether every group has `count` free blocks."""
        return all(group.pool.num_free_blocks >= count for group in self._groups)

    # -- prefix hits -------------------------------------------------------------------------------------------------

    def get_computed_blocks(self, request: Request) -> ComputedBlocks:
        """Returns the longest prefix of the request that all groups can continue. It excludes the last token, which
        must be computed to sample the next. It is empty for a request that wants log probabilities of its whole
        prompt."""
        hashes, num_blocks = list[bytes](), 0
        if self.caches_prefixes:
            num_blocks = (request.num_tokens - 1) // self.block_size
            hashes = self._hashes(request, num_blocks)
            num_blocks = 0 if request.wants_prompt_logprobs else longest_hit(self._groups, hashes, num_blocks)
        held = tuple(group.find(hashes, num_blocks) for group in self._groups)
        return ComputedBlocks(held, num_blocks * self.block_size)

    def cache_blocks(self, request: Request) -> None:
        """Makes full blocks findable if their tokens are known and their KV is computed in this step or an earlier one;
        none before the executor has accepted the request."""
        num_full = request.num_certain_tokens // self.block_size
        if num_full <= request.blocks.num_cached or not self.caches_prefixes or not request.is_accepted:
            return
        hashes = self._hashes(request, num_full)
        for group, held in zip(self._groups, request.blocks.held, strict=True):
            group.cache(held, hashes, request.blocks.num_cached, num_full)
        if self.recorder is not None:
            self.recorder.stored(request, request.blocks.num_cached, num_full)
        self._set_num_cached_blocks(request, num_full)
        self.upcoming.announce(request.blocks)

    def _set_num_cached_blocks(self, request: Request, num_blocks: int) -> None:
        request.blocks.num_cached = num_blocks
        request.blocks.num_tokens_to_cache = (num_blocks + 1) * self.block_size if self.caches_prefixes else _NO_LIMIT

    def _hashes(self, request: Request, num_blocks: int) -> list[bytes]:
        """Returns the hashes of at least the first `num_blocks` blocks of the request, and stores them."""
        if request.blocks.hashed_for != self._weights_version:
            if request.blocks.hashes:
                request.blocks.other_hashes[request.blocks.hashed_for] = request.blocks.hashes
            request.blocks.hashed_for = self._weights_version
            request.blocks.hashes = request.blocks.other_hashes.pop(self._weights_version, [])
        hashes, size = request.blocks.hashes, self.block_size
        for i in range(len(hashes), num_blocks):
            token_ids = request.token_ids[i * size : (i + 1) * size]
            extra_keys = request.images.keys(i * size, (i + 1) * size)
            parent = hashes[-1] if hashes else computed_root(request.blocks.root_hash, self._weights_version)
            hashes.append(hash_block(parent, token_ids, extra_keys))
        return hashes

    def indexed_hashes(self, request: Request) -> Sequence[bytes]:
        """Returns the hashes under which the index has blocks of a request's tokens but the last."""
        if self.indexed is None or not self.caches_prefixes or request.wants_prompt_logprobs:
            return ()
        num_blocks = (request.num_tokens - 1) // self.block_size
        return self.indexed.keys(self._hashes(request, num_blocks)[:num_blocks])

    def keeps_waiting(self, request: Request) -> bool:
        """Returns whether the blocks that made `awaits` return True for this request are still being computed, without
        a look-up."""
        return self.upcoming.keeps_waiting(request)

    def awaits(self, request: Request, computed: ComputedBlocks) -> bool:
        """Returns whether a request should wait for the block after its hit, which is being computed or loaded."""
        if request.wants_prompt_logprobs:
            return False
        if self.upcoming.is_awaited_by(request, computed.num_tokens // self.block_size):
            return True
        return self.tiers is not None and self.tiers.begin_load(request, computed)

    # -- admission ---------------------------------------------------------------------------------------------------

    def num_missing_blocks(self, request: Request, computed: ComputedBlocks, keep_free: bool = False) -> list[int]:
        """Returns how many blocks of each group would have to be freed before `admit` succeeds; 0 or less: none."""
        return [
            group.num_missing(request.num_tokens, held, keep_free)
            for group, held in zip(self._groups, computed.held, strict=True)
        ]

    def find_room(self, request: Request, others_run: bool) -> ComputedBlocks | None:
        """Returns the prefix hit to `admit` a waiting request with, or None if there are too few blocks.

        While others run, a refused request is refused again until a block is freed, so that a long prompt is not
        looked up in every step.
        """
        num_free = [group.pool.num_free_blocks for group in self._groups]
        if others_run and request is self._refused:
            at_refusal = self._num_free_at_refusal
            if all(now <= then for now, then in zip(num_free, at_refusal, strict=True)):
                self._num_free_at_refusal = num_free
                return None
        computed = self.get_computed_blocks(request)
        if any(missing > 0 for missing in self.num_missing_blocks(request, computed, keep_free=others_run)):
            self._refused, self._num_free_at_refusal = request, num_free
            return None
        self._refused = None
        return computed

    def admit(self, request: Request, computed: ComputedBlocks) -> None:
        """Gives a request without blocks its first ones, so that its prefill cannot run out of memory: the blocks of
        all its known tokens, or of one step in groups with windows. `num_missing_blocks` must be 0 or less."""
        for group, held in zip(self._groups, computed.held, strict=True):
            group.admit(request.num_tokens, held)
        request.blocks.held = computed.held
        request.blocks.await_none()
        self._set_num_cached_blocks(request, computed.num_tokens // self.block_size)
        request.blocks.num_slots = self._num_slots(computed.held)
        if self.caches_prefixes:
            self.upcoming.announce(request.blocks)
        if self.indexed is not None:
            self.indexed.expect(request)

    # -- while it runs -----------------------------------------------------------------------------------------------

    def num_allocatable_tokens(self, request: Request, num_tokens: int) -> int:
        """Returns how many of num_tokens tokens beyond the computed ones have blocks or could be given some."""
        num_computed = request.num_computed_tokens
        if num_computed + num_tokens <= request.blocks.num_slots:
            return num_tokens
        reaches = (
            (held.end + group.pool.num_free_blocks) * group.block_size
            for group, held in zip(self._groups, request.blocks.held, strict=True)
        )
        return min(num_tokens, min(reaches) - num_computed)

    def allocate_slots(self, request: Request, num_tokens: int) -> NewBlocks | None:
        """Extends the block tables to hold num_tokens tokens beyond the computed ones.

        Returns:
            The blocks appended, or None if there are not enough and nothing was changed.
        """
        num_slots = request.num_computed_tokens + num_tokens
        if num_slots <= request.blocks.num_slots:
            return self.no_blocks
        for group, held in zip(self._groups, request.blocks.held, strict=True):
            if group.end_of(num_slots) - held.end > group.pool.num_free_blocks:
                return None
        counts: list[int] = []
        ids: list[int] = []
        for group, held in zip(self._groups, request.blocks.held, strict=True):
            count = max(0, group.end_of(num_slots) - held.end)
            counts.append(count)
            ids += group.extend(held, count)
        request.blocks.num_slots = self._num_slots(request.blocks.held)
        return NewBlocks(counts, ids)

    def _num_slots(self, held_blocks: Sequence[HeldBlocks]) -> int:
        reaches = (held.end * group.block_size for group, held in zip(self._groups, held_blocks, strict=True))
        return min(reaches, default=_NO_LIMIT)

    def start_step(self, requests: Iterable[Request]) -> None:
        """Prepares the decision of a step: releases blocks of running requests that precede the windows of all later
        tokens. Steps in flight may still read them, but the next holder runs in a later step, and steps execute in
        order."""
        self.upcoming.start_step()
        if not self._windows:
            return
        for request in requests:
            if not request.is_accepted:
                continue  # its blocks may have to become findable later
            self.cache_blocks(request)  # results may have arrived since it ran
            for index, group in self._windows:
                group.release_behind(request.blocks.held[index], request.num_certain_tokens)
        for _, group in self._windows:
            group.start_step()

    def free(self, request: Request) -> None:
        """Releases all blocks of a request. Steps in flight may still write to them, but the next holder runs in a
        later step, and steps execute in order."""
        self.cache_blocks(request)
        for group, held in zip(self._groups, request.blocks.held, strict=True):
            group.release(held.blocks)
        if self.indexed is not None:
            self.indexed.stop_expecting(request)
        request.blocks.drop()

    def forget(self, request: Request) -> None:
        """Removes all blocks of a request from the hash index, as their contents cannot be trusted."""
        for group in self._groups:
            for block_hash in request.blocks.hashes:
                group.pool.forget(block_hash)
        if self.tiers is not None:
            self.tiers.forget(request)

    def num_exclusive_blocks(self, request: Request) -> list[int]:
        """Returns how many blocks of each group would become free with the request."""
        return [sum(block.ref_count == 1 for block in held.blocks) for held in request.blocks.held]

    def share_index(self, index: BlockIndex) -> None:
        """Keeps the index up to date with the blocks of this replica that are findable, now or soon."""
        if self.indexed is not None and self.caches_prefixes:
            self.indexed.share(index)

    def leave_index(self, running: Iterable[Request]) -> None:
        """Removes all blocks from the index, including those that running requests were going to compute."""
        if self.indexed is not None:
            self.indexed.leave(running)
