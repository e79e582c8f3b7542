"""What the kernel benchmark measures: cases, the contestants of each, and what is asked of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from benchmarks.gpu.measure import Call

OURS = "ours"


@dataclass
class Contestant:
    """One way to compute a case: a call per buffer set, and how far its result is from the reference's.

    error() makes the call on the first set and compares, in the measure that `tolerance` bounds; None = torch's own.
    """

    calls: list[Call]
    error: Callable[[], float] | None
    tolerance: float = 1e-2
    planning_seconds: float = 0.0  # on the host, once per batch, not in its time


@dataclass
class Built:
    """A case with its buffers on the device."""

    contestants: dict[str, Contestant]  # ours first
    reset: Call | None = None
    notes: list[str] = field(default_factory=list)  # who is not there, and why


@dataclass(frozen=True)
class Target:
    """What is asked of our kernel; `unit` says of which number. All but "us": the more, the better.

    fraction  of the floor's speed: floor time / time
    us        microseconds, at most
    tflops    10^12 floating-point operations per second
    ratio     time of the contestant `against` / our time
    """

    unit: str
    must: float | None = None
    stretch: float | None = None
    against: str = ""


@dataclass(frozen=True)
class Case:
    """num_bytes: every input read once, every output written once. rate: the ceiling of num_flops, see `Ceilings`.

    facts: what else the JSON file says of it.
    """

    group: str
    name: str
    num_bytes: int
    build: Callable[[], Built]
    num_flops: int = 0
    targets: tuple[Target, ...] = ()
    rate: str = "matmul"
    facts: Mapping[str, object] = field(default_factory=dict)


def peer_of(name: str) -> str:
    """Whose contestant it is: of a peer's ways, as "torch (kn)" and "torch (nk)", the fastest counts."""
    return name.partition(" (")[0]
