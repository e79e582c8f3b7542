"""The seam of an index of blocks, such as that for comparing replicas."""

from collections.abc import Iterable
from typing import Protocol


class BlockIndex(Protocol):
    """The hashes of the findable blocks of one replica."""

    def add(self, block_hash: bytes) -> None: ...

    def remove(self, block_hash: bytes) -> None:
        """Removes a hash; does nothing if it is unknown."""

    def remove_all(self, block_hashes: Iterable[bytes]) -> None: ...

    def hashes(self) -> set[bytes]:
        """Returns all hashes, for checks. Slow."""
