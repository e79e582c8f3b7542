"""Which processors the processes of a stack run on, and from which node their memory comes.

A step waits for the slowest of its threads, so executors gain from cores that nobody else uses, and, on machines of
several NUMA nodes, from memory of their own node. Sets of processors are written as the kernel writes them: `0-3,8`.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pagewire.config import ExecutorConfig, ServeConfig, ServiceConfig
from pagewire.errors import StartupError

logger = logging.getLogger(__name__)

AUTO = "auto"
NODES = Path("/sys/devices/system/node")
# Of set_mempolicy(2), which neither Python nor libc has.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_PREFERRED = 1
_MAX_NODES = 1024
# Of so many cores, one is for the other services where the user leaves it to us; of fewer, none.
_CORES_PER_SPARE = 8
_FEW_CORES = 4


@dataclass(frozen=True)
class Place:
    """cpus: sorted; none: anywhere. node: whose memory is preferred; None: wherever it is first touched."""

    cpus: tuple[int, ...] = ()
    node: int | None = None

    @property
    def flags(self) -> dict[str, str | None]:
        """Of the process that is to be there."""
        return {
            "cpu_bind": cpu_text(self.cpus) or None,
            "numa_bind": None if self.node is None else str(self.node),
        }


@dataclass(frozen=True)
class Places:
    """executors: of each. others: of gateway, tokenizer and scheduler."""

    executors: Sequence[Place]
    others: Place


def cpu_set(text: str) -> tuple[int, ...]:
    """Raises ValueError for what is no set."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cpus))


def cpu_text(cpus: Sequence[int]) -> str:
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def usable_cpus() -> tuple[int, ...]:
    return tuple(sorted(os.sched_getaffinity(0)))


def nodes(folder: Path = NODES) -> dict[int, tuple[int, ...]]:
    """Processors of each node that has some; none where the kernel does not say."""
    found = {
        int(path.name.removeprefix("node")): cpu_set((path / "cpulist").read_text())
        for path in folder.glob("node[0-9]*")
    }
    return {number: cpus for number, cpus in sorted(found.items()) if cpus}


def divide(cpus: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Into parts of neighbours, as even as can be; of fewer than count, some are shared."""
    if len(cpus) < count:
        return [(cpus[index % len(cpus)],) for index in range(count)]
    bounds = [index * len(cpus) // count for index in range(count + 1)]
    return [tuple(cpus[first:last]) for first, last in itertools.pairwise(bounds)]


def places(
    config: ServeConfig, count: int, usable: Sequence[int], of_nodes: Mapping[int, Sequence[int]]
) -> Places | None:
    """Of `count` executors and the services beside them; None if the flags ask for none. Raises StartupError."""
    if config.cpu_bind is None and config.numa_bind is None:
        return None
    chosen = _chosen_nodes(config.numa_bind, count, usable, of_nodes)
    if config.cpu_bind in (None, AUTO):
        executors = _by_node(chosen, count, usable, of_nodes)
    else:
        executors = [
            Place(cpus, node) for cpus, node in zip(_given(config.cpu_bind or "", count, usable), chosen, strict=True)
        ]
    taken = {cpu for place in executors for cpu in place.cpus}
    return Places(executors, Place(tuple(cpu for cpu in usable if cpu not in taken)))


def _chosen_nodes(
    numa_bind: str | None, count: int, usable: Sequence[int], of_nodes: Mapping[int, Sequence[int]]
) -> list[int | None]:
    """Of each executor: in turns."""
    if numa_bind is None:
        return [None] * count
    here = [number for number, cpus in of_nodes.items() if set(cpus) & set(usable)]
    try:
        named = here if numa_bind == AUTO else [int(text) for text in numa_bind.split(",")]
    except ValueError as error:
        raise StartupError(f"--numa-bind {numa_bind}: expected auto, or numbers of nodes as 0,1") from error
    if unknown := [number for number in named if number not in here]:
        raise StartupError(
            f"--numa-bind {numa_bind}: no processor that may be used is on node {unknown[0]}; there are "
            f"{', '.join(map(str, here)) or 'none'} (lscpu)"
        )
    return [named[index % len(named)] if named else None for index in range(count)]


def _by_node(
    chosen: Sequence[int | None],
    count: int,
    usable: Sequence[int],
    of_nodes: Mapping[int, Sequence[int]],
    *,
    with_others: bool = True,
) -> list[Place]:
    """The processors of a node, or all, divided among its executors. with_others: but for those that the other
    services of the stack have."""
    found: list[Place] = [Place()] * count
    for node in dict.fromkeys(chosen):
        indices = [index for index in range(count) if chosen[index] == node]
        cpus = [cpu for cpu in usable if node is None or cpu in of_nodes[node]]
        spare = 0 if not with_others or len(cpus) < _FEW_CORES else -(-len(cpus) // _CORES_PER_SPARE)
        for index, part in zip(indices, divide(cpus[spare:], len(indices)), strict=True):
            found[index] = Place(part, node)
    return found


def _given(text: str, count: int, usable: Sequence[int]) -> list[tuple[int, ...]]:
    """Sets for each executor, separated by `|`, or one for all, which is divided."""
    sets = [_checked(part, usable) for part in text.split("|")]
    if len(sets) == 1:
        return divide(sets[0], count)
    if len(sets) != count:
        raise StartupError(f"--cpu-bind {text}: {len(sets)} sets for {count} executors; give one for each, or one")
    return sets


def _checked(text: str, usable: Sequence[int]) -> tuple[int, ...]:
    try:
        cpus = cpu_set(text)
    except ValueError as error:
        raise StartupError(f"--cpu-bind {text}: expected auto, or numbers of processors as 0-3,8") from error
    missing = [cpu for cpu in cpus if cpu not in usable]
    if not cpus or missing:
        what = f"processor {missing[0]} may not be used" if missing else "no processor is named"
        raise StartupError(f"--cpu-bind {text}: {what}; there are {cpu_text(usable)}")
    return cpus


def bind(config: ServiceConfig) -> None:
    """This process and all that it starts. Before its first thread. Raises StartupError."""
    usable = usable_cpus()
    place = place_of(config, usable, nodes())
    _prefer(place.node)
    if place.cpus != usable:
        os.sched_setaffinity(0, place.cpus)


def place_of(config: ServiceConfig, usable: tuple[int, ...], of_nodes: Mapping[int, Sequence[int]]) -> Place:
    """Of a service that is started by itself. Raises StartupError."""
    cpus = usable if config.cpu_bind is None else _checked(config.cpu_bind, usable)
    if not isinstance(config, ExecutorConfig):
        return Place(cpus)
    cpus = _of_rank(config, cpus)
    if config.numa_bind is None:
        return Place(cpus)
    chosen = _chosen_nodes(config.numa_bind, 1, cpus, of_nodes)
    (place,) = _by_node(chosen, 1, cpus, of_nodes, with_others=False)
    return Place(cpus if config.cpu_bind is not None else place.cpus, place.node)


def _of_rank(config: ExecutorConfig, cpus: tuple[int, ...]) -> tuple[int, ...]:
    """Of a group on this machine each rank has a part."""
    if config.cpu_bind is None or config.num_ranks == 1 or config.distributed_executor_backend != "mp":
        return cpus
    return divide(cpus, config.num_ranks)[config.rank]


def _prefer(node: int | None) -> None:
    """Takes memory from this node while it has some, for what is touched from now on; set_mempolicy(2)."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if node is None or number is None:
        return
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (_MAX_NODES // bits))()
    mask[node // bits] |= 1 << node % bits
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, _MPOL_PREFERRED, mask, _MAX_NODES) != 0:
        # Containers may not, by default; what runs on a node touches its memory first, and so has it there mostly.
        reason = os.strerror(ctypes.get_errno())
        logger.warning("--numa-bind %d: cores are bound, memory is not (set_mempolicy: %s)", node, reason)
