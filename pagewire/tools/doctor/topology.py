"""Topology: the locations of processors, memory and GPUs, and whether processes are bound accordingly."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from pagewire.config import ServeConfig
from pagewire.errors import StartupError
from pagewire.process import binding, local_executors
from pagewire.process.binding import CpuBinding, CpuBindings
from pagewire.process.cpu_sets import cpu_set, cpu_text
from pagewire.tools.doctor.finding import Finding, Findings, absent, note, ok, warning
from pagewire.tools.doctor.gpu import gpus, node_of
from pagewire.tools.doctor.host import Host

_SYS = "/sys/devices/system/cpu"
# Turbo clocks of cores of one kind differ by a few percent.
_ANOTHER_KIND = 0.8
_MANY_CORES = 8


def check_topology(host: Host, config: ServeConfig) -> Findings:
    usable = tuple(sorted(host.usable_cpus()))
    at_gpus = [] if config.device == "cpu" else [node_of(host, gpu) for gpu in gpus(host)]
    yield _numa(host, config, usable, at_gpus)
    yield _numa_balancing(host)
    yield _kinds(host, config, usable)
    try:
        places = _places(host, config, usable)
    except StartupError:
        yield absent("core binding", "its flags are wrong (see there)")
        return
    if places is None:
        yield ok("core binding", f"none: executors may run on all of {cpu_text(usable)}")
        return
    yield _binding(host, places, usable)
    yield from _gpu_nodes(config, places, at_gpus)


def _places(host: Host, config: ServeConfig, usable: Sequence[int]) -> CpuBindings | None:
    """Returns what flags bind; None: nothing. Raises StartupError."""
    names = [] if config.cpu_bind is None and config.numa_bind is None else local_executors.names(config)
    return binding.places(config, len(names), usable, host.nodes()) if names else None


def _numa(host: Host, config: ServeConfig, usable: Sequence[int], at_gpus: Sequence[int | None]) -> Finding:
    of_nodes = host.nodes()
    with_cores = {number: cpus for number in of_nodes if (cpus := sorted(set(of_nodes[number]) & set(usable)))}
    if config.numa_bind is not None:
        return ok("NUMA", f"{len(with_cores)} node(s); --numa-bind {config.numa_bind}")
    if len(with_cores) <= 1:
        return ok("NUMA", f"{max(1, len(of_nodes))} node(s); all usable cores are on one")
    found = ", ".join(f"node {number}: {cpu_text(cpus)}" for number, cpus in with_cores.items())
    if at_gpus:
        return note(
            "NUMA",
            found,
            "launches of kernels and copies to a GPU take longer from the other node's cores",
            f"--numa-bind {_wanted(config, at_gpus, config.data_parallel_size)}: the node of each executor's GPU",
        )
    return warning(
        "NUMA",
        found,
        "threads read weights and KV blocks from the other node's memory, at about half the rate",
        f"an executor for each node: --data-parallel-size {len(with_cores)} --numa-bind auto; one alone: "
        f"--numa-bind {max(with_cores, key=lambda node: len(with_cores[node]))}",
    )


def _numa_balancing(host: Host) -> Finding:
    if len(host.nodes()) <= 1 or host.number("/proc/sys/kernel/numa_balancing") != 1:
        return ok("NUMA balancing", "off, or there is one node")
    return note(
        "NUMA balancing",
        "on, with several nodes",
        "the kernel repeatedly unmaps pages to learn which node reads them, which costs page faults in steps",
        "--numa-bind auto, then: sysctl kernel.numa_balancing=0",
    )


def _kinds(host: Host, config: ServeConfig, usable: Sequence[int]) -> Finding:
    """Checks for fast and economical cores, by the kernel's own measure, else by their clocks."""
    speeds = _numbers(host, usable, "cpu_capacity") or _numbers(host, usable, "cpufreq/cpuinfo_max_freq")
    fastest = max(speeds.values(), default=0)
    slow = [cpu for cpu, speed in speeds.items() if speed < _ANOTHER_KIND * fastest]
    if not slow:
        return ok("kinds of cores", "one" if speeds else "the kernel reports none")
    fast = [cpu for cpu in usable if cpu not in slow]
    found = f"fast: {cpu_text(fast)}; slow: {cpu_text(slow)}"
    if config.cpu_bind not in (None, binding.AUTO) or config.device == "cuda":
        return ok("kinds of cores", found)
    return note(
        "kinds of cores",
        found,
        "threads have equal shares of a step, which ends with the slowest of them",
        f"--cpu-bind {cpu_text(fast)}: the slow ones are left to gateway, tokenizer and scheduler",
    )


def _numbers(host: Host, cpus: Sequence[int], file: str) -> dict[int, int]:
    """Returns numbers by processor; {} unless all processors have one."""
    found = {cpu: number for cpu in cpus if (number := host.number(f"{_SYS}/cpu{cpu}/{file}")) is not None}
    return found if len(found) == len(cpus) else {}


def _binding(host: Host, places: CpuBindings, usable: Sequence[int]) -> Finding:
    found = "; ".join(f"executor {index}: {_text(place)}" for index, place in enumerate(places.executors))
    found += f"; the other services: {_text(places.others)}"
    for one, other in itertools.combinations(places.executors, 2):
        if shared := set(_whole_cores(host, one.cpus)) & set(_whole_cores(host, other.cpus)):
            return warning(
                "core binding",
                found,
                f"two executors compute on processor {min(shared)}, or on the same core: each waits for the other",
                "--cpu-bind with sets that share no core (lscpu -e), or fewer executors",
            )
    of_nodes = host.nodes()
    for place in places.executors:
        nodes = [number for number, cpus in of_nodes.items() if set(cpus) & set(place.cpus)]
        if len(nodes) > 1 or (place.node is not None and nodes and nodes != [place.node]):
            memory = "" if place.node is None else f", its memory of node {place.node}"
            return warning(
                "core binding",
                found,
                f"cores of one executor ({cpu_text(place.cpus)}) are of node {', '.join(map(str, nodes))}{memory}: it "
                "reads over the link between the nodes",
                "--numa-bind auto without --cpu-bind, or processors of one node (lscpu)",
            )
    spare = set(places.others.cpus).difference(*(place.cpus for place in places.executors))
    if not spare and len(usable) >= _MANY_CORES:
        return note(
            "core binding",
            found,
            "gateway, tokenizer and scheduler share processors with executors, and steps wait for them",
            "--cpu-bind auto, or one processor in eight that is not in --cpu-bind",
        )
    return ok("core binding", found)


def _whole_cores(host: Host, cpus: Sequence[int]) -> set[int]:
    """Returns the processors, with the other hardware threads of their cores."""
    lists = (host.read(f"{_SYS}/cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus)
    return {sibling for text in lists for sibling in cpu_set(text)}


def _text(place: CpuBinding) -> str:
    return (cpu_text(place.cpus) or "anywhere") + ("" if place.node is None else f" of node {place.node}")


def _gpu_nodes(config: ServeConfig, places: CpuBindings, at_gpus: Sequence[int | None]) -> Findings:
    """Checks the nodes of GPUs. Executors get GPUs in order, one for each rank."""
    each = config.tensor_parallel_size * config.pipeline_parallel_size
    wrong: dict[int, tuple[int, int]] = {}
    for index, place in enumerate(places.executors):
        for gpu, node in list(enumerate(at_gpus))[index * each : (index + 1) * each]:
            if node is not None and place.node is not None and node != place.node:
                wrong[gpu] = (node, place.node)
    if not at_gpus:
        return
    if not wrong:
        yield ok("GPU nodes", ", ".join(f"GPU {gpu}: {_node(node)}" for gpu, node in enumerate(at_gpus)))
        return
    yield warning(
        "GPU nodes",
        ", ".join(f"GPU {gpu} is at node {at}, its executor is bound to {bound}" for gpu, (at, bound) in wrong.items()),
        "launches and copies to the GPU go over the link between the nodes",
        f"--numa-bind {_wanted(config, at_gpus, len(places.executors))}",
    )


def _wanted(config: ServeConfig, at_gpus: Sequence[int | None], count: int) -> str:
    """Returns the node of each executor's first GPU; auto if one is unknown."""
    firsts = at_gpus[:: config.tensor_parallel_size * config.pipeline_parallel_size][:count]
    return "auto" if None in firsts else ",".join(map(str, firsts))


def _node(node: int | None) -> str:
    return "node unknown" if node is None else f"node {node}"
