"""One load: blocks of the KV cache that are being filled, and those of the hit before them."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pagewire.services.scheduler.memory.group_blocks import GroupBlocks
from pagewire.services.scheduler.tiers.source import Source
from pagewire.services.scheduler.values.blocks import Block, HeldBlocks, RequestBlocks
from pagewire.services.scheduler.values.request import Request
from pagewire.v1.executor_pb2 import BlockSet, KVLoad


class Wanted(NamedTuple):
    """A block to be filled, and the hash of what it is to hold."""

    group: int
    block: Block
    block_hash: bytes
    place: int  # in the block table


@dataclass(slots=True, eq=False)
class Part:
    """The blocks that a load reads from one source: one KVLoad."""

    load_id: int
    source: Source
    wanted: list[Wanted] = field(default_factory=list)  # in the order of their groups
    num_bytes: Counter[int] = field(default_factory=Counter)  # of these blocks, by kind of tier

    def message(self) -> KVLoad:
        """Returns the order to the executor."""
        message = KVLoad(load_id=self.load_id, source=self.source.address)
        for group in dict.fromkeys(one.group for one in self.wanted):
            of_group = [one for one in self.wanted if one.group == group]
            ids, hashes = [one.block.block_id for one in of_group], b"".join(one.block_hash for one in of_group)
            message.blocks.append(BlockSet(group=group, ids=ids, hashes=hashes))
        return message


class Load:
    """Holds its blocks, each once, until it is over, or longer while `is_held`."""

    def __init__(
        self,
        request: Request,
        groups: Sequence[GroupBlocks],
        tables: Sequence[HeldBlocks],
        parts: Sequence[Part],
        upcoming: RequestBlocks,
        seconds: float,
    ) -> None:
        """request: has the tokens of the blocks. tables: by group, the blocks after which it can continue, with those
        to be filled. upcoming: what requests wait for. seconds: the expected duration."""
        self.request = request
        self.parts = parts
        self.upcoming = upcoming
        self.seconds = seconds
        self.end = len(upcoming.hashes)  # the number of blocks after which a request can continue
        self.is_held = False  # its blocks stay held when it is over
        self.on_waited: Callable[[], None] = lambda: None  # called once its request waits for it no more
        self._num_parts_left = len(parts)
        self._groups = groups
        self._tables = tables
        self._forgotten: set[bytes] = set()
        self._is_void = False  # nothing of it may be found

    @property
    def is_over(self) -> bool:
        return not self._num_parts_left

    def give_up(self) -> None:
        """Ends the wait of requests, whether the load is over or not."""
        self.upcoming.drop()
        awaited = self.request.blocks.awaited
        if awaited is not None and awaited[0] is self.upcoming:
            self.request.blocks.await_none()
            self.on_waited()

    def forget(self, hashes: Collection[bytes] | None) -> None:
        """Keeps these contents from becoming findable; None: all."""
        if hashes is None:
            self._is_void = True
        else:
            self._forgotten.update(hashes)

    def finish(self, part: Part, missing: Collection[int]) -> list[Wanted]:
        """Makes the blocks of a part that were loaded findable, and returns those that are now. missing: indices of the
        others."""
        found = []
        for index, one in enumerate(part.wanted):
            if not (index in missing or self._is_void or one.block_hash in self._forgotten):
                self._groups[one.group].pool.register(one.block, one.block_hash)
                if one.block.block_hash is not None:  # otherwise the same contents were computed meanwhile
                    found.append(one)
        self._num_parts_left -= 1
        if self.is_over:
            self.give_up()
            if not self.is_held:
                self.release()
        return found

    def release(self) -> None:
        """Releases all blocks; those that are findable are evicted last."""
        for group, table in zip(self._groups, self._tables, strict=False):
            group.release(table.blocks)
        self._tables = ()

    def held(self, group: int) -> Iterator[Block]:
        """Yields the blocks of a group that it holds."""
        if self._tables:
            yield from self._tables[group].blocks
