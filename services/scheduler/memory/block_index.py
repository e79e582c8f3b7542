"""The seams at which the findable blocks are followed: for comparing replicas, and for programs elsewhere."""

from collections.abc import Iterable
from typing import Protocol

from pagewire.services.scheduler.values.request import Request


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

    def stored(self, request: Request, start: int, end: int) -> None:
        """Takes in that the request's blocks from `start` to `end - 1`, in its order, can be found in all groups, by
        its hashes. Other requests may have made some of them findable before."""
