"""Schedules of failures, drawn from a seed: the same seed is the same schedule, whatever the machine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

# kind -> how often, for services and for the ways to them.
SERVICE_FAULTS = {"kill": 5, "restart": 2, "stop": 2, "hang": 2, "stutter": 1}
WAY_FAULTS = {"cut": 3, "refuse": 2, "partition": 3, "slow": 2}
GATEWAYS = ("gateway", "sister")
# A silence that must count as a hang, and one that must not, as shares of --hang-timeout.
LONG, SHORT = (1.3, 1.8), (0.02, 0.4)
LONG_SHARE = 0.2


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, and is mended `seconds` later.

    kill: SIGKILL, started again. restart: SIGTERM, started again when it has ended. stop: SIGSTOP, then SIGCONT. hang:
    SIGSTOP, then SIGKILL, started again. stutter: stopped and continued, again and again. cut: connections break, new
    ones work. refuse: connections break, new ones do, too. partition: connections stay, and nothing arrives. slow:
    everything arrives late. disk: the disk is full.
    """

    kind: str
    targets: tuple[str, ...]  # services, or those that ways lead to from the left; none for disk
    at: float  # share of all events that clients have read when it begins
    patience: float  # it begins at the latest so many seconds after the one before
    seconds: float
    direction: str = "both"  # of a partition: forth = what requests take, back = what answers take

    def __str__(self) -> str:
        way = "" if self.direction == "both" else f" {self.direction}"
        where = "+".join(self.targets)
        return f"{self.kind}{way}{' ' if where else ''}{where} at {self.at:.0%} for {self.seconds:.2f} s"


@dataclass(frozen=True)
class Ask:
    """One request of a schedule."""

    name: str  # in the catalogue
    is_kept: bool  # its client comes again after any failure, with an Idempotency-Key if it generates
    leaves_at: int | None = None  # its client disconnects after so many events and does not return


@dataclass(frozen=True)
class Schedule:
    seed: int
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]

    @property
    def spares_gateways(self) -> bool:
        """Returns whether all that fails lies behind the gateways: then clients may notice a pause and nothing else."""
        return not any(fault.kind == "disk" or _hits_gateways(fault) for fault in self.faults)

    def num_faults(self, target: str) -> int:
        """Returns whether the fault is of this service or of the connection to it."""
        return sum(target in fault.targets for fault in self.faults)

    def __str__(self) -> str:
        return "; ".join(map(str, self.faults))


@dataclass(frozen=True)
class Setting:
    """The kind of line that schedules are drawn for."""

    services: Sequence[str]  # by process
    requests: Sequence[str]  # names in the catalogue
    rare_requests: Sequence[str]  # slower ones; in one schedule of eight
    hang_timeout: float  # seconds
    has_disk: bool  # a disk that can be filled
    max_asks: int


def draw(seed: int, setting: Setting, faults: Sequence[Fault] = ()) -> Schedule:
    """Draws a schedule. faults: in place of those that follow from the seed."""
    rng = random.Random(f"chaos {seed}")
    services = [name for name in setting.services if name not in GATEWAYS or seed % 2]
    drawn: list[Fault] = []
    at = 0.0
    for _ in range(rng.choice((1, 2, 2, 3, 3, 4))):
        at = min(0.9, at + rng.uniform(0.02, 0.4))
        drawn.append(_fault(rng, setting, services, at))
    faults = faults or drawn
    names = rng.sample(list(setting.requests), min(len(setting.requests), rng.randint(4, setting.max_asks)))
    must_be_kept = any(map(_hits_gateways, faults))
    asks = [Ask(name, must_be_kept or rng.random() < 0.3) for name in names]
    if setting.rare_requests and rng.random() < 1 / 8:
        asks.append(Ask(rng.choice(list(setting.rare_requests)), True))
    asks += [Ask(rng.choice(names), False, rng.randint(0, 30)) for _ in range(rng.choice((0, 0, 1, 2)))]
    return Schedule(seed, tuple(asks), tuple(faults))


def parse_fault(text: str) -> Fault:
    """KIND:SECONDS:TARGET+TARGET, early in the schedule. Raises ValueError."""
    kind, seconds, targets = (text + ":").split(":")[:3]
    if kind not in (*SERVICE_FAULTS, *WAY_FAULTS, "disk"):
        raise ValueError(f"there is no fault {kind!r}")
    return Fault(kind, tuple(filter(None, targets.split("+"))), 0.25, 30.0, float(seconds))


def _fault(rng: random.Random, setting: Setting, services: Sequence[str], at: float) -> Fault:
    patience = rng.choice((0.0, 0.05, 0.3, 1.0, 5.0))
    if setting.has_disk and rng.random() < 0.08:
        return Fault("disk", (), at, patience, rng.uniform(0.1, 1.0))
    faults = SERVICE_FAULTS if rng.random() < 0.6 else WAY_FAULTS
    kind = rng.choices(list(faults), list(faults.values()))[0]
    targets = tuple(rng.sample(services, rng.choice((1, 1, 1, 1, 2, 2, len(services)))))
    direction = rng.choice(("both", "both", "forth", "back")) if kind == "partition" else "both"
    return Fault(kind, targets, at, patience, _seconds(rng, setting, kind), direction)


def _seconds(rng: random.Random, setting: Setting, kind: str) -> float:
    if kind in ("stop", "partition") and rng.random() < LONG_SHARE:
        return setting.hang_timeout * rng.uniform(*LONG)
    return setting.hang_timeout * rng.uniform(*SHORT)


def _hits_gateways(fault: Fault) -> bool:
    return not set(fault.targets).isdisjoint(GATEWAYS)
