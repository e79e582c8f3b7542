"""The seam of an index of blocks, such as the one by which replicas are compared."""

from collections.abc import Iterable
from typing import Protocol


class BlockIndex(Protocol):
    """The blocks of one replica that can be found, by their hashes."""

    def add(self, block_hash: bytes) -> None: ...

    def remove(self, block_hash: bytes) -> None:
        """Does nothing for an unknown hash."""

    def remove_all(self, block_hashes: Iterable[bytes]) -> None: ...

    def hashes(self) -> set[bytes]:
        """Returns all hashes, for checks; slow."""
