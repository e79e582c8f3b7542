"""The log of jobs that outlive their gateway process: a generation that is kept for its client, a response in the
background, a batch.

A job has a description (`about`) and entries in order. One process at a time owns it, by a lease that the process
renews. A process without the lease cannot append, and no entry reaches a client before it is in the log. So the next
owner, which starts after the last entry, continues what every client has seen.
"""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

# If the owner of a job has not renewed its lease for this time, another process may take the job. Clients of an owner
# that died wait for this long. An owner that is merely slow also loses the job, and its work since the last entry.
LEASE_S = 1.0


class LeaseLost(Exception):
    """Another process owns the job, or the job is gone."""


@dataclass(frozen=True)
class Bounds:
    """The limits of a log. The oldest jobs make room for new ones, those without an owner first."""

    count: int
    bytes: int
    ttl_s: float  # after which a job without an owner is gone
    # Whether unfinished jobs also expire and make room. The client of a kept generation can send its request again;
    # a response in the background exists nowhere else.
    drops_unfinished: bool = True


@dataclass(eq=False)
class Lease:
    """The ownership of a job by this process. `Leases.hold` keeps it up to date."""

    kind: str
    id: str  # of the job
    lost_leases: int = 0  # earlier owners that died
    owner: str = field(default_factory=lambda: uuid.uuid4().hex)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    is_lost: bool = False
    has_ended: bool = False  # the job has
    interrupt: Callable[[], object] = lambda: None  # called when the lease is lost


@dataclass(frozen=True)
class Append:
    """The next entry of a job."""

    lease: Lease
    number: int  # from 0
    value: bytes
    is_last: bool


@dataclass(frozen=True)
class Tail:
    """The entries from a given number, and the state of the job after them."""

    values: list[bytes]
    ended: bool  # these are the last ones
    is_free: bool  # no process owns the job


class Standing(Enum):
    """The state of a lease that its owner has tried to renew."""

    LOST = 0
    HELD = 1
    CANCELLED = 2  # held, but the owner must end the job


class Log(Protocol):
    """The jobs of one kind. Every method raises ApiError if the log cannot be reached."""

    lease_s: float  # the duration of a lease

    async def begin(self, id: str, about: bytes) -> bytes:
        """Adds a job without entries, unless one with this id exists. Returns the description of the job."""

    async def find(self, id: str) -> bytes | None:
        """Returns the description of a job; None if there is none, or it has expired."""

    async def claim(self, id: str) -> Lease | None:
        """Makes this process the owner of a job; None if it has ended or another process owns it."""

    async def append(self, entries: Sequence[Append]) -> list[bool]:
        """Returns for each entry whether it was appended; it is not if its lease is lost."""

    async def read(self, id: str, first: int) -> Tail | None:
        """Returns the entries from number `first` on; None if there is no such job."""

    async def renew(self, leases: Sequence[Lease]) -> list[Standing]:
        """Extends these leases from now, except lost ones."""

    async def release(self, lease: Lease) -> None:
        """Lets any process claim the job at once. Does nothing if the lease is lost."""

    async def close(self) -> None: ...
