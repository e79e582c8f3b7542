"""The seams of the findable blocks: for comparing replicas, for programs elsewhere, and for tiers."""

from collections.abc import Iterable, Iterator
from typing import Protocol

from pagewire.services.scheduler.values.blocks import Block, ComputedBlocks
from pagewire.services.scheduler.values.request import Request
from pagewire.v1.executor_pb2 import KVLoaded, StepRequest


class BlockListener(Protocol):
    """Follows which blocks of one pool can be found."""

    def add(self, block_hash: bytes) -> None: ...

    def remove(self, block_hash: bytes) -> None:
        """Removes a hash; does nothing if it is unknown."""


class BlockIndex(BlockListener, Protocol):
    """The hashes of the findable blocks of one replica."""

    def remove_all(self, block_hashes: Iterable[bytes]) -> None: ...

    def hashes(self) -> set[bytes]:
        """Returns all hashes, for checks. Slow."""


class BlockRecorder(Protocol):
    """Records what the findable blocks of one replica hold."""

    def stored(self, request: Request, start: int, end: int, group: int | None = None) -> None:
        """Takes in that the request's blocks from `start` to `end - 1`, in its order, can be found by its hashes: in
        one group, or in all. Other requests may have made some of them findable before."""


class BlockTiers(Protocol):
    """Decides what is copied between the KV cache of one executor and its tiers."""

    @property
    def are_known(self) -> bool:
        """False while prompts wait for the executor to say what its tiers hold."""

    @property
    def has_loads(self) -> bool:
        """True if a load waits for the next step."""

    def begin_load(self, request: Request, computed: ComputedBlocks) -> bool:
        """Begins to load the blocks after the hit of a waiting request if that is worthwhile; returns whether the
        request waits for them."""

    def num_reachable_tokens(self, request: Request) -> int:
        """Returns the length of the request's prefix that is here or could be loaded."""

    def end_loads(self, loaded: Iterable[KVLoaded]) -> None:
        """Takes in loads that ended. Raises InvalidResult."""

    def take_changes(self) -> StepRequest | None:
        """Returns the saves and loads of a step that is about to be sent."""

    def forget(self, request: Request) -> None:
        """Forgets the blocks of a request in the tiers, too."""

    def clear(self) -> None:
        """Forgets all blocks in the tiers, too."""

    def held(self, group: int) -> Iterator[Block]:
        """Yields the blocks of a group that loads hold, for checks."""
