"""The loads of one executor that are under way, and the blocks that they fill and hold. Pure.

A load takes free blocks, and holds them and the hit before them. When it has ended, the blocks that arrived can be
found, and the rest are free. It belongs to no request: what becomes of a request does not touch it.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from copy import copy

from pagewire.services.scheduler.memory.kv_cache import KVCacheManager
from pagewire.services.scheduler.memory.prefix_hit import longest_hit
from pagewire.services.scheduler.tiers.costs import LoadCosts
from pagewire.services.scheduler.tiers.load import Load, Part, Wanted
from pagewire.services.scheduler.tiers.reach import SAVED, Reach
from pagewire.services.scheduler.tiers.source import Source
from pagewire.services.scheduler.values.blocks import Block, HeldBlocks, RequestBlocks
from pagewire.services.scheduler.values.request import Request
from pagewire.services.scheduler.values.step import InvalidResult
from pagewire.v1.executor_pb2 import KVLoad, KVLoaded


class Plan:
    """The blocks to load so that a request can continue after `end` blocks."""

    def __init__(self, start: int, end: int, hashes: Sequence[bytes], tables: Sequence[HeldBlocks]) -> None:
        """start: the number of blocks of the hit. tables: by group; `SAVED` stands for those to load."""
        self.start = start
        self.end = end
        self.hashes = hashes
        self.tables = tables
        self.seconds = 0.0  # expected


class Loads:
    """Begins loads, and takes in what became of them."""

    def __init__(self, kv: KVCacheManager, costs: LoadCosts, block_bytes: Sequence[int]) -> None:
        """kv: empty memory. block_bytes: by group."""
        self._kv = kv
        self._costs = costs
        self._block_bytes = block_bytes
        self._last_load_id = 0
        self._parts: dict[int, tuple[Part, Load]] = {}  # that have not ended, by load_id
        self._unsent: list[Part] = []
        self._filling: dict[tuple[int, bytes], Block] = {}  # blocks to be filled, by group and hash

    @property
    def has_unsent(self) -> bool:
        """True if a load waits for the next step."""
        return bool(self._unsent)

    @property
    def present(self) -> Collection[Load]:
        """The loads that have not ended."""
        return dict.fromkeys(load for _, load in self._parts.values())

    @property
    def seconds_ahead(self) -> float:
        """The expected seconds of the loads that have not ended."""
        return sum(load.seconds for load in self.present) if self._parts else 0.0

    def plan(self, request: Request, most: int, sources: Sequence[Source], start: int | None = None) -> Plan | None:
        """Returns what to load so that a request can continue after as many of its blocks as possible, up to `most`;
        None if this is nothing, or if there is no room for the request without a preemption. start: the number of
        blocks of its hit, if it is known."""
        hashes = request.blocks.hashes
        for source in sources:
            source.contents.trust_again()
        if start is not None and not self._may_gain(hashes, start, most, sources):
            return None
        reach = self._reach(sources)
        end = reach.longest(hashes, most)
        if start is None:
            start = longest_hit(self._kv.groups, hashes, end)
            # What is on its way is not loaded again.
            start = max([start, *(load.end for load in self.present if load.upcoming.hashes == hashes[: load.end])])
        if end <= start:
            return None
        tables = reach.tables(hashes, end)
        if not reach.fits(tables, request.num_tokens):
            return None
        plan = Plan(start, end, hashes, tables)
        num_bytes = Counter[int]()
        for number, places, keys in self._saved(plan):
            for place in places:
                kind = _source_of(number, keys[place], sources).kind_of(number, keys[place])
                num_bytes[kind] += self._block_bytes[number]
        plan.seconds = self._costs.seconds(num_bytes)
        return plan if num_bytes else None  # otherwise all is on its way

    def _may_gain(self, hashes: Sequence[bytes], start: int, most: int, sources: Sequence[Source]) -> bool:
        """Returns whether a group that keeps all tokens has the block after a hit, or there is no such group: a look-up
        of one block, while nothing is to be loaded."""
        number = next((i for i, group in enumerate(self._kv.groups) if not group.window), None)
        if start >= most or number is None:
            return start < most
        after = hashes[start]
        is_here = self._kv.groups[number].pool.find(after) is not None or (number, after) in self._filling
        return is_here or any(source.has(number, after) for source in sources)

    def num_reachable(self, request: Request, most: int, sources: Sequence[Source]) -> int:
        """Returns after how many of its first blocks, up to `most`, a request could continue if all were loaded."""
        return self._reach(sources).longest(request.blocks.hashes, most)

    def _reach(self, sources: Sequence[Source]) -> Reach:
        return Reach(self._kv.groups, lambda group, one: any(s.has(group, one) for s in sources), self._filling)

    def _saved(self, plan: Plan) -> Iterator[tuple[int, list[int], Sequence[bytes]]]:
        """Yields, by group, the places in the block table that have to be loaded, and the hashes of all places."""
        for number, (group, table) in enumerate(zip(self._kv.groups, plan.tables, strict=True)):
            places = [i for i, block in enumerate(table.blocks, start=table.first) if block is SAVED]
            yield number, places, group.keys(plan.hashes)

    def begin(self, request: Request, plan: Plan, sources: Sequence[Source]) -> Load:
        """Begins a load with the next step. The plan must have been made in the same decision."""
        for group, table in zip(self._kv.groups, plan.tables, strict=True):
            for block in table.blocks:
                if block is not SAVED:
                    group.pool.acquire(block)  # before others are taken, which might evict it
        parts: dict[str, Part] = {}
        for number, places, keys in self._saved(plan):
            pool, table = self._kv.groups[number].pool, plan.tables[number]
            for place in places:
                source = _source_of(number, keys[place], sources)
                if source.address not in parts:
                    self._last_load_id += 1
                    parts[source.address] = Part(self._last_load_id, source)
                block = table.blocks[place - table.first] = pool.allocate()
                part = parts[source.address]
                part.wanted.append(Wanted(number, block, keys[place], place))
                part.num_bytes[source.kind_of(number, keys[place])] += self._block_bytes[number]
                self._filling[number, keys[place]] = block
        upcoming = RequestBlocks(request.blocks.root_hash)
        upcoming.hashes, upcoming.held = list(plan.hashes[: plan.end]), tuple(plan.tables)
        upcoming.num_cached = plan.start
        self._kv.upcoming.announce(upcoming)
        load = Load(request, self._kv.groups, plan.tables, list(parts.values()), upcoming, plan.seconds)
        for part in load.parts:
            self._parts[part.load_id] = part, load
            self._unsent.append(part)
        return load

    def take_unsent(self) -> list[KVLoad]:
        """Returns the loads that begin with a step."""
        unsent, self._unsent = self._unsent, []
        return [part.message() for part in unsent]

    def end(self, loaded: KVLoaded) -> tuple[Part, Sequence[Wanted]]:
        """Takes in what became of a load; returns what it was, and the blocks that can be found now. Raises
        InvalidResult if it is not under way."""
        part, load = self._parts.get(loaded.load_id, (None, None))
        missing = set(loaded.missing)
        if part is None or load is None or part in self._unsent or not missing <= set(range(len(part.wanted))):
            raise InvalidResult(f"the executor reports load {loaded.load_id}, which is not under way like this")
        del self._parts[loaded.load_id]
        for one in part.wanted:
            if self._filling.get((one.group, one.block_hash)) is one.block:
                del self._filling[one.group, one.block_hash]
        found = load.finish(part, missing)
        if self._kv.recorder is not None:
            loaded_as = copy(load.request)  # it may have other hashes by now
            loaded_as.blocks = load.upcoming
            for one in found:
                ratio = self._kv.groups[one.group].block_size // self._kv.block_size
                self._kv.recorder.stored(loaded_as, one.place * ratio, (one.place + 1) * ratio, one.group)
        for index in missing:
            part.source.contents.doubt(part.wanted[index].group, part.wanted[index].block_hash)
        return part, found

    def forget(self, hashes: Collection[bytes] | None) -> None:
        """Keeps contents that are on their way from becoming findable; None: all."""
        for load in self.present:
            load.forget(hashes)


def _source_of(group: int, block_hash: bytes, sources: Sequence[Source]) -> Source:
    """Returns the first source that has a block; one of them has."""
    return next(source for source in sources if source.has(group, block_hash))
