"""Binds the processes of a stack to processors, and their memory to a NUMA node.

A step waits for the slowest of its threads, so executors gain from exclusive cores and, on machines with several NUMA
nodes, from memory of their own node. Sets of processors are written as the kernel writes them: `0-3,8`.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import logging
import os
import platform
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pagewire.config import ExecutorConfig, ServeConfig, ServiceConfig
from pagewire.config.profiles import runs_on_cuda
from pagewire.errors import StartupError
from pagewire.process import cgroup
from pagewire.process.cpu_sets import cpu_set, cpu_text, has_slow_cores, usable_cpus

logger = logging.getLogger(__name__)

AUTO = "auto"
NODES = Path("/sys/devices/system/node")
# The number of set_mempolicy(2), which neither Python nor libc exposes.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_PREFERRED = 1
_MAX_NODES = 1024
# With auto, the other services get one of this many cores; machines with few cores leave none.
_CORES_PER_SPARE = 8
_FEW_CORES = 4
# Begins the abstract name of the socket that reserves a processor for a device thread.
_RESERVATION = "\0pagewire device thread on processor "


@dataclass(frozen=True)
class CpuBinding:
    """The processors and the NUMA node of a process.

    cpus: sorted; empty: any. node: the preferred source of memory; None: where memory is first touched.
    """

    cpus: tuple[int, ...] = ()
    node: int | None = None

    @property
    def flags(self) -> dict[str, str | None]:
        """The flags that bind a process to this place."""
        return {
            "cpu_bind": cpu_text(self.cpus) or None,
            "numa_bind": None if self.node is None else str(self.node),
        }


@dataclass(frozen=True)
class CpuBindings:
    """The place of each executor, and that of gateway, tokenizer and scheduler."""

    executors: Sequence[CpuBinding]
    others: CpuBinding


def nodes(folder: Path = NODES) -> dict[int, tuple[int, ...]]:
    """Returns the processors of each NUMA node that has some; {} if the kernel does not report nodes."""
    found = {
        int(path.name.removeprefix("node")): cpu_set((path / "cpulist").read_text())
        for path in folder.glob("node[0-9]*")
    }
    return {number: cpus for number, cpus in sorted(found.items()) if cpus}


def divide(cpus: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Divides processors into even parts of adjacent ones; with fewer processors than parts, parts share them."""
    if len(cpus) < count:
        return [(cpus[index % len(cpus)],) for index in range(count)]
    bounds = [index * len(cpus) // count for index in range(count + 1)]
    return [tuple(cpus[first:last]) for first, last in itertools.pairwise(bounds)]


def places(
    config: ServeConfig, count: int, usable: Sequence[int], of_nodes: Mapping[int, Sequence[int]]
) -> CpuBindings | None:
    """Returns the places of `count` executors and of the other services; None binds nothing. Raises StartupError."""
    if config.cpu_bind is None and config.numa_bind is None:
        is_full = count == 1 and _fills(config, usable)
        return CpuBindings([CpuBinding(tuple(usable))], _beside(usable)) if is_full else None
    chosen = _chosen_nodes(config.numa_bind, count, usable, of_nodes)
    if config.cpu_bind in (None, AUTO):
        executors = _by_node(chosen, count, usable, of_nodes)
    else:
        given = _given(config.cpu_bind or "", count, usable)
        executors = [CpuBinding(cpus, node) for cpus, node in zip(given, chosen, strict=True)]
    taken = {cpu for place in executors for cpu in place.cpus}
    spare = CpuBinding(tuple(cpu for cpu in usable if cpu not in taken))
    return CpuBindings(executors, _beside(usable) if count == 1 and not spare.cpus else spare)


def _fills(config: ServeConfig, usable: Sequence[int]) -> bool:
    """Returns whether the threads of one executor leave no processor to the other services."""
    num_ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    threads = config.num_threads or min(len(usable), cgroup.cpu_quota() or len(usable))
    is_full = threads >= len(usable) > 1 and num_ranks == 1 and not runs_on_cuda(config.device)
    return is_full and not has_slow_cores(usable)


def _beside(usable: Sequence[int]) -> CpuBinding:
    """Returns the place of services beside an executor on all processors: all but that of its device thread."""
    return CpuBinding(tuple(usable[:-1]))


def _chosen_nodes(
    numa_bind: str | None, count: int, usable: Sequence[int], of_nodes: Mapping[int, Sequence[int]]
) -> list[int | None]:
    """Returns the node of each executor; executors take the nodes in turns."""
    if numa_bind is None:
        return [None] * count
    here = [number for number, cpus in of_nodes.items() if set(cpus) & set(usable)]
    try:
        named = here if numa_bind == AUTO else [int(text) for text in numa_bind.split(",")]
    except ValueError as error:
        raise StartupError(f"--numa-bind {numa_bind}: expected auto, or numbers of nodes as 0,1") from error
    if unknown := [number for number in named if number not in here]:
        raise StartupError(
            f"--numa-bind {numa_bind}: node {unknown[0]} has no usable processor; nodes with usable ones: "
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
) -> list[CpuBinding]:
    """Divides the processors of each node among its executors. with_others: leaves some to the other services."""
    found: list[CpuBinding] = [CpuBinding()] * count
    for node in dict.fromkeys(chosen):
        indices = [index for index in range(count) if chosen[index] == node]
        cpus = [cpu for cpu in usable if node is None or cpu in of_nodes[node]]
        spare = 0 if not with_others or len(cpus) < _FEW_CORES else -(-len(cpus) // _CORES_PER_SPARE)
        for index, part in zip(indices, divide(cpus[spare:], len(indices)), strict=True):
            found[index] = CpuBinding(part, node)
    return found


def _given(text: str, count: int, usable: Sequence[int]) -> list[tuple[int, ...]]:
    """Parses one set for each executor, separated by `|`, or one set, which is divided among them."""
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
        what = f"processor {missing[0]} is not usable" if missing else "it names no processor"
        raise StartupError(f"--cpu-bind {text}: {what}; usable are {cpu_text(usable)}")
    return cpus


def bind(config: ServiceConfig) -> None:
    """Binds this process and its future children. Call it before the first thread starts. Raises StartupError."""
    usable = usable_cpus()
    place = place_of(config, usable, nodes())
    _prefer(place.node)
    if place.cpus != usable:
        _change(os.sched_setaffinity, place.cpus)
    if config.cpu_bind is not None and not isinstance(config, ExecutorConfig):
        _wait_for_turns()


def place_of(config: ServiceConfig, usable: tuple[int, ...], of_nodes: Mapping[int, Sequence[int]]) -> CpuBinding:
    """Returns the place of a service that is started on its own. Raises StartupError."""
    cpus = usable if config.cpu_bind is None else _checked(config.cpu_bind, usable)
    if not isinstance(config, ExecutorConfig):
        return CpuBinding(cpus)
    cpus = _of_rank(config, cpus)
    if config.numa_bind is None:
        return CpuBinding(cpus)
    chosen = _chosen_nodes(config.numa_bind, 1, cpus, of_nodes)
    (place,) = _by_node(chosen, 1, cpus, of_nodes, with_others=False)
    return CpuBinding(cpus if config.cpu_bind is not None else place.cpus, place.node)


def _of_rank(config: ExecutorConfig, cpus: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the processors of a rank: a part of those of its group, if the group is on this machine."""
    if config.cpu_bind is None or config.num_ranks == 1 or config.distributed_executor_backend != "mp":
        return cpus
    return divide(cpus, config.num_ranks)[config.rank]


def _prefer(node: int | None) -> None:
    """Makes the process take memory from this node while the node has some; set_mempolicy(2)."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if node is None or number is None:
        return
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (_MAX_NODES // bits))()
    mask[node // bits] |= 1 << node % bits
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, _MPOL_PREFERRED, mask, _MAX_NODES) != 0:
        # Containers may not do it by default. Threads on a node touch memory first, so most of it is there anyway.
        reason = os.strerror(ctypes.get_errno())
        logger.warning("--numa-bind %d: only processors are bound, not memory (set_mempolicy: %s)", node, reason)


class DevicePlace:
    """The processors of an executor on a CPU: the last is that of its device thread; the rest of the process has those
    before it.

    The device thread launches what all threads compute, so that these wait whenever it loses its processor.
    """

    def __init__(self, config: ExecutorConfig) -> None:
        """Moves the calling thread, and those that it starts, to the processors of the rest."""
        self._cpus = usable_cpus() if config.cpu_bind is not None else ()
        self._reserved = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        if len(self._cpus) > 1:
            _change(os.sched_setaffinity, self._cpus[:-1])
            _wait_for_turns()

    def compute(self) -> None:
        """Lets the calling thread, which loads the model, and those that it starts use all processors."""
        if len(self._cpus) > 1:
            _change(os.sched_setscheduler, os.SCHED_OTHER, os.sched_param(0))
            _change(os.sched_setaffinity, self._cpus)

    def stay(self) -> None:
        """Keeps the calling thread, the device thread, on its processor, and all others of the process off it, unless
        another executor of this machine has its device thread there.

        On that processor, a thread that waits for work would take the time of the one that has some. Threads that the
        device thread starts later stay beside it.
        """
        if len(self._cpus) > 1 and self._claim():
            for task in Path("/proc/self/task").iterdir():
                with suppress(OSError):  # it has just ended; what forbids it is logged below
                    os.sched_setaffinity(int(task.name), self._cpus[:-1])
            _change(os.sched_setaffinity, self._cpus[-1:])

    def _claim(self) -> bool:
        """Reserves the processor of the device thread by the name of a socket, which the kernel frees with the
        process."""
        if self._reserved.getsockname():
            return True  # by an earlier start
        try:
            self._reserved.bind(f"{_RESERVATION}{self._cpus[-1]}")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            logger.info("processor %d has the device thread of another executor; this one's moves", self._cpus[-1])
            return False
        return True


def _wait_for_turns() -> None:
    """Makes the calling thread wait until a thread that computes has finished its piece of work, after which that one
    yields (`parallel.cpp`): interrupted in it, it would hold up all others."""
    _change(os.sched_setscheduler, os.SCHED_BATCH, os.sched_param(0))


def _change(call: Callable[..., None], *values: object) -> None:
    """Changes where or when the calling thread runs, if that is permitted."""
    try:
        call(0, *values)
    except OSError as error:  # a sandbox forbids it, or a container has lost processors meanwhile
        logger.warning(
            "%s failed (%s), so services and executor may take processors from each other: permit it in the sandbox",
            call.__name__,
            error.strerror,
        )
