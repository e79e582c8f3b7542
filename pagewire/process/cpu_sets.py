"""Sets of processors, as the kernel writes them: `0-3,8`."""

import os
from collections.abc import Sequence
from pathlib import Path


def cpu_set(text: str) -> tuple[int, ...]:
    """Parses a set of processors. Raises ValueError."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cpus))


def cpu_text(cpus: Sequence[int]) -> str:
    """Returns a set of processors as text."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def usable_cpus() -> tuple[int, ...]:
    """Returns the processors that the calling thread may use."""
    return tuple(sorted(os.sched_getaffinity(0)))


def has_slow_cores(cpus: Sequence[int], devices: Path = Path("/sys/devices")) -> bool:
    """Returns whether some of these processors are of a slower kind, by what Linux reports for Intel's and Arm's."""
    capacities = [devices / f"system/cpu/cpu{cpu}/cpu_capacity" for cpu in cpus]
    kinds = {path.read_text() for path in capacities if path.is_file()}
    return len(kinds) > 1 or (devices / "cpu_atom/cpus").is_file()
