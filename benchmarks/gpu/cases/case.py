"""Cases of the kernel benchmark: their contestants, and the targets for our kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks.gpu.measure import Call

OURS = "ours"
IN_TURN = "in turn"


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
    notes: list[str] = field(default_factory=list)  # missing contestants, and why


@dataclass(frozen=True)
class Target:
    """The target for a number of our kernel, which `unit` names. More is better, except for "us".

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
    """One measurement. num_bytes: every input and output once. rate: the ceiling of num_flops, see `Ceilings`.

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
    """Returns the peer of a contestant; of several ways, as "torch (kn)" and "torch (nk)", the fastest counts."""
    return name.partition(" (")[0]


def in_turn(calls: Sequence[Call]) -> Contestant:
    """Returns these calls of ours such that none begins before the call before it has ended, as others' kernels do."""
    return Contestant([partial(_in_turn, call) for call in calls], None)


def _in_turn(call: Call) -> object:
    from pagewire.kernels.triton.common import launch  # where Triton interprets, kernels are defined later than this

    launch.enabled = False
    try:
        return call()
    finally:
        launch.enabled = True
