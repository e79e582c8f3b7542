"""The log of kept generations: what has been said of each so far, entry by entry, and who goes on with it.

One process at a time writes for a generation, by a lease that it renews. Who has lost it cannot append any more, and
nothing is told to a client before it is in the log: whoever goes on after the log's last entry continues what every
client has seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

# A generation whose writer was not heard of for so long goes to who asks for it.
LEASE_S = 1.0


@dataclass(frozen=True)
class Bounds:
    """What a log may hold. The oldest generations make room, those that nobody writes first."""

    count: int
    bytes: int
    ttl_s: float  # after which a generation that nobody writes is gone


@dataclass(frozen=True)
class Append:
    """The next entry of a generation."""

    id: str
    owner: str  # who writes it
    number: int
    value: bytes
    is_last: bool


@dataclass(frozen=True)
class Tail:
    """What follows a place in the log."""

    values: list[bytes]
    ended: bool  # nothing comes after these
    is_free: bool  # nobody writes


class Log(Protocol):
    """Every method raises ApiError if the log cannot be reached."""

    async def begin(self, id: str, about: bytes) -> bytes:
        """Adds a generation without entries; what is kept about it, if there was one of this id before."""

    async def find(self, id: str) -> bytes | None:
        """What is kept about a generation."""

    async def claim(self, id: str, owner: str) -> bool:
        """Whether `owner` is who writes now: the generation has not ended, and nobody else has its lease."""

    async def append(self, entries: Sequence[Append]) -> list[bool]:
        """Whether each was appended; it is not if its owner does not write that generation any more."""

    async def read(self, id: str, first: int) -> Tail | None:
        """From this entry on. None: there is no such generation (any more)."""

    async def renew(self, leases: Sequence[tuple[str, str]]) -> None:
        """Makes the leases of these (generation, owner) last from now on, unless they are lost."""

    async def release(self, id: str, owner: str) -> None:
        """Whoever asks may write now; nothing if the lease is another's."""

    async def close(self) -> None: ...
