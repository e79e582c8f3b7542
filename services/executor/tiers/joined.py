"""The tiers of an executor with several ranks: each keeps its part of a block, and loads it.

A block is loaded once every rank has loaded its part; what one of them does not find is missing.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pagewire.services.executor.parallel.group import Group
from pagewire.services.executor.tiers.loads import LOAD_S, Loaded
from pagewire.v1.executor_pb2 import BlockHashes

# The longest time from the step with a load to the last rank's report of it. A load that is cancelled has none.
_REPORTED_S = 6 * LOAD_S


@dataclass(frozen=True)
class WholeSizes:
    """Bytes on all ranks together."""

    blocks: tuple[int, ...]  # of a block of each group
    host: int  # of the memory for blocks

    @classmethod
    def of(cls, group: Group, blocks: Sequence[int], host: int) -> WholeSizes:
        """Returns the sums of what each rank gives. Raises RankLost."""
        return cls(tuple(sum(group.of_all(size)) for size in blocks), sum(group.of_all(host)))


@dataclass
class _Joined:
    load_id: int
    report: Callable[[Loaded], None]
    began: float = field(default_factory=time.monotonic)
    parts: list[Loaded] = field(default_factory=list)


class JoinedLoads:
    """The loads that not all ranks have reported. Used on all threads."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._lock = threading.Lock()
        self._joined: dict[int, _Joined] = {}  # by number
        self._last = 0

    def join(self, load_id: int, report: Callable[[Loaded], None]) -> int:
        """Returns the number under which the ranks report a load: unlike `load_id`, it is never used again. report:
        called once on any thread, when all have."""
        with self._lock:
            until = time.monotonic() - _REPORTED_S
            for number in [number for number, joined in self._joined.items() if joined.began < until]:
                del self._joined[number]
            self._last += 1
            self._joined[self._last] = _Joined(load_id, report)
            return self._last

    def on_loaded(self, part: Loaded) -> None:
        """Takes in the report of one rank. Its load_id is the number."""
        with self._lock:
            if (joined := self._joined.get(part.load_id)) is None:
                return
            joined.parts.append(part)
            if len(joined.parts) < self._num_ranks:
                return
            del self._joined[part.load_id]
        num_bytes = Counter[str]()
        for one in joined.parts:
            num_bytes.update(one.num_bytes)
        missing = {index for one in joined.parts for index in one.missing}
        seconds = max(one.seconds for one in joined.parts)
        joined.report(Loaded(joined.load_id, sorted(missing), seconds, dict(num_bytes)))


class OtherRanks(Protocol):
    """The other ranks of an executor, which keep parts of the same blocks."""

    num_ranks: int  # of the executor
    loads: JoinedLoads

    def open(self, kv_format: str) -> None:
        """Makes this the format of all blocks, of weights that are in force by now."""

    def forget(self, blocks: Sequence[BlockHashes]) -> None:
        """Makes them forget blocks (none: all), and waits until they have. Raises RpcError."""


def format_of_rank(kv_format: str, rank: int, num_ranks: int) -> str:
    """Returns the format of a rank's parts of blocks of a format."""
    return hashlib.sha256(f"{kv_format} {rank} {num_ranks}".encode()).hexdigest() if num_ranks > 1 else kv_format
