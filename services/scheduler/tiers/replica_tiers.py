"""The tiers of one executor, as the decisions of its steps use them: saves of full blocks, and loads.

A load is a prefix hit that takes a while. It goes out with the next step. Requests wait for it as they wait for blocks
that another request computes; others overtake them. What was not found is computed.

Blocks are saved in the step that makes them findable, so evicting one, preempting a request or losing the executor
copies nothing. Pure: messages go out with a step, and come in through `end_loads` and `contents`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from weakref import WeakKeyDictionary

from pagewire.services.scheduler.memory.kv_cache import KVCacheManager
from pagewire.services.scheduler.tiers import metrics
from pagewire.services.scheduler.tiers.contents import TierContents
from pagewire.services.scheduler.tiers.costs import LoadCosts
from pagewire.services.scheduler.tiers.holding import Holding
from pagewire.services.scheduler.tiers.load import Load
from pagewire.services.scheduler.tiers.loads import Loads
from pagewire.services.scheduler.tiers.source import Source
from pagewire.services.scheduler.values.blocks import Block, ComputedBlocks
from pagewire.services.scheduler.values.executor_info import ExecutorInfo
from pagewire.services.scheduler.values.request import Request
from pagewire.v1.executor_pb2 import BlockHashes, BlockSet, KVLoaded, StepRequest

# (position of the first token, number of tokens) -> seconds by which computing them delays all requests.
ComputeSeconds = Callable[[int, int], float]
# Makes the executor forget blocks in its tiers, and calls back when it has; None: all.
Forget = Callable[[Sequence[BlockHashes] | None, Callable[[], None]], None]
# Takes in that a request waits for a load, or waits no more.
OnWait = Callable[[Request, bool], None]
# Calls a function after so many seconds, which may be infinite.
CallLater = Callable[[float, Callable[[], None]], None]


class _Additions:
    """Collects the hashes of blocks of one group that become findable."""

    def __init__(self) -> None:
        self.hashes: list[bytes] = []

    def add(self, block_hash: bytes) -> None:
        self.hashes.append(block_hash)

    def remove(self, block_hash: bytes) -> None:
        """Does nothing: `ReplicaTiers.take_changes` looks each block up."""


class ReplicaTiers:
    """Decides what one executor saves and loads."""

    def __init__(
        self,
        replica_id: int,
        info: ExecutorInfo,
        kv: KVCacheManager,
        contents: TierContents,
        compute_seconds: ComputeSeconds,
        forget: Forget,
        call_later: CallLater = lambda seconds, function: None,
        on_wait: OnWait = lambda request, begins: None,
    ) -> None:
        """kv: empty memory. call_later: decides a step after the call."""
        self._call_later, self._on_wait = call_later, on_wait
        self.contents = contents
        self.costs = LoadCosts(info.kv_tiers)
        # The tiers of other executors with the same format, from which it may load, too.
        self.others: Callable[[], Sequence[Source]] = tuple
        self._own = Source("", contents)
        self._replica_id = replica_id
        self._weights_version = info.weights.version
        self._kv = kv
        self._block_bytes = [group.block_bytes for group in info.kv_groups]
        self._compute_seconds = compute_seconds
        self._forget_at_executor = forget
        self._num_forgetting = 0  # calls that have not ended; nothing is loaded meanwhile
        self._saves = bool(info.kv_tiers)
        self._loads = Loads(kv, self.costs, self._block_bytes)
        self._holdings: list[Holding] = []
        # The epochs in which a request was looked up, and has begun a load: one that found less is not tried again.
        self._looked_up: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        self._tried: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        self._added = [_Additions() for _ in kv.groups]
        for group, added in zip(kv.groups, self._added, strict=True) if self._saves else ():
            group.pool.indexes += (added,)

    # -- loads -------------------------------------------------------------------------------------------------------

    @property
    def are_known(self) -> bool:
        return self.contents.is_known

    @property
    def has_loads(self) -> bool:
        return self._loads.has_unsent

    def begin_load(self, request: Request, computed: ComputedBlocks) -> bool:
        if self._num_forgetting or self._tried.get(request) == request.epoch:
            return False
        is_new = self._looked_up.get(request) != request.epoch
        if is_new:
            self._looked_up[request] = request.epoch
            metrics.QUERIES.inc(request.num_tokens - computed.num_tokens)
        size, sources = self._kv.block_size, self._sources
        start, most = computed.num_tokens // size, (request.num_tokens - 1) // size
        if most > start and not self.contents.is_known:
            return True  # the executor has just come, perhaps for this request, and is about to say what it holds
        plan = self._loads.plan(request, most, sources, start)
        if plan is None:
            return False
        seconds = self._compute_seconds(start * size, (plan.end - start) * size)
        if self._loads.seconds_ahead + plan.seconds >= seconds:
            if is_new:
                self.costs.fade()
                metrics.TOO_SLOW.inc()
            return False
        self._tried[request] = request.epoch
        load = self._loads.begin(request, plan, sources)
        request.blocks.awaited = load.upcoming, plan.end
        self._on_wait(request, True)
        load.on_waited = partial(self._on_wait, request, False)
        # Whatever the tier does, a request waits at most as long as computing takes.
        self._call_later(seconds, partial(_give_up, load))
        return True

    def leave(self) -> None:
        """Takes in that the executor is lost: nothing waits for its loads any more."""
        for load in self._loads.present:
            load.on_waited()

    def num_reachable_tokens(self, request: Request) -> int:
        size = self._kv.block_size
        return self._loads.num_reachable(request, (request.num_tokens - 1) // size, self._sources) * size

    @property
    def _sources(self) -> Sequence[Source]:
        return (self._own, *self.others())

    def expected_seconds(self, hashes: Sequence[bytes]) -> float:
        """Returns the expected seconds of a load of these blocks that begins now, and of those before it."""
        group = self.contents.indexed_group
        kind = self._own.kind_of(group, hashes[-1]) if hashes else 0
        return self._loads.seconds_ahead + self.costs.seconds({kind: len(hashes) * self._block_bytes[group]})

    def end_loads(self, loaded: Iterable[KVLoaded]) -> None:
        for one in loaded:
            num_before = [len(added.hashes) for added in self._added]
            part, found = self._loads.end(one)
            for added, num in zip(self._added, num_before, strict=True):
                del added.hashes[num:]  # what was just loaded is not saved
            self.costs.learn(one.seconds, part.num_bytes, is_whole=not one.missing)
            metrics.on_loaded(one, len(part.wanted))
            indexed = self.contents.indexed_group
            num_found = sum(wanted.group == indexed for wanted in found)
            metrics.HITS.inc(num_found * self._kv.groups[indexed].block_size)

    # -- early loads -------------------------------------------------------------------------------------------------

    def hold(self, request: Request) -> Holding:
        """Returns the early loads of a request that does not wait for this replica yet: none at first."""
        holding = Holding(request, self._begin_early)
        self._holdings.append(holding)
        return holding

    def _begin_early(self, request: Request, num_blocks: int) -> Load | None:
        if self._num_forgetting or request.blocks.hashed_for != self._weights_version:
            return None
        most = min(num_blocks, (request.num_tokens - 1) // self._kv.block_size, len(request.blocks.hashes))
        plan = self._loads.plan(request, most, self._sources)
        return None if plan is None else self._loads.begin(request, plan, self._sources)

    def _drop_needless(self) -> None:
        """Releases what is held for requests that run here or have ended."""
        for holding in self._holdings:
            if holding.request.is_finished or holding.request.replica_id == self._replica_id:
                holding.release()
        self._holdings = [one for one in self._holdings if not one.is_over]

    # -- steps -------------------------------------------------------------------------------------------------------

    def take_changes(self) -> StepRequest | None:
        if self._holdings:
            self._drop_needless()
        if not self._loads.has_unsent and not any(added.hashes for added in self._added):
            return None
        message = StepRequest(loads=self._loads.take_unsent())
        for number, added in enumerate(self._added):
            hashes, added.hashes = added.hashes, []
            if self._saves and (saved := self._saves_of(number, hashes)).ids:
                message.saves.append(saved)
        return message

    def promise_saves(self) -> None:
        """Counts the blocks that the next step is going to save as being saved."""
        for number, added in enumerate(self._added):
            for block_hash in added.hashes if self._saves else ():
                self.contents.expect(number, block_hash)

    def _saves_of(self, number: int, hashes: Iterable[bytes]) -> BlockSet:
        """Returns those of a group's new blocks that are to be saved."""
        saved, kept = BlockSet(group=number), []
        for block_hash in dict.fromkeys(hashes):
            block = self._kv.groups[number].pool.find(block_hash)  # it may have been evicted since
            if block is not None and not self.contents.is_in_first(number, block_hash):
                saved.ids.append(block.block_id)
                kept.append(block_hash)
                self.contents.expect(number, block_hash)
        saved.hashes = b"".join(kept)
        return saved

    # -- forgetting --------------------------------------------------------------------------------------------------

    def forget(self, request: Request) -> None:
        blocks = []
        for number, group in enumerate(self._kv.groups):
            keys = group.keys(request.blocks.hashes)
            for block_hash in keys:
                self.contents.drop(number, block_hash)
            blocks.append(BlockHashes(group=number, hashes=b"".join(keys)))
        self._loads.forget(set(request.blocks.hashes))
        if request.blocks.hashes:
            self._ask_to_forget([one for one in blocks if one.hashes])

    def clear(self) -> None:
        self.contents.clear()
        self._loads.forget(None)
        for added in self._added:
            added.hashes.clear()
        self._ask_to_forget(None)

    def _ask_to_forget(self, blocks: Sequence[BlockHashes] | None) -> None:
        self._num_forgetting += 1
        self._forget_at_executor(blocks, self._on_forgotten)

    def _on_forgotten(self) -> None:
        self._num_forgetting -= 1

    # -- checks ------------------------------------------------------------------------------------------------------

    def held(self, group: int) -> Iterator[Block]:
        over = (load for holding in self._holdings for load in holding.loads if load.is_over)
        for load in (*self._loads.present, *over):
            yield from load.held(group)


def _give_up(load: Load) -> None:
    """Ends the wait for a load that takes longer than computing."""
    if not load.is_over:
        metrics.TOO_LATE.inc()
        load.give_up()
