"""Memory, and how the kernel manages it."""

from __future__ import annotations

from pagewire.config import ServeConfig
from pagewire.process import cgroup
from pagewire.tools.doctor.finding import Finding, Findings, absent, note, ok, problem, warning
from pagewire.tools.doctor.host import Host, size

_SHM_FOR_NCCL = 1 << 30
_FEWEST_MAPS = 65530  # the kernel's default


def check_memory(host: Host, config: ServeConfig) -> Findings:
    fields = host.meminfo()
    yield _available(fields)
    yield _swap(fields)
    yield _transparent_huge_pages(host)
    yield _reserved_huge_pages(fields)
    yield _overcommit(host)
    yield _maps(host)
    yield _shared_memory(host, config)


def _available(fields: dict[str, int]) -> Finding:
    available, total = fields.get("MemAvailable"), fields.get("MemTotal")
    if available is None or total is None:
        return absent("memory", "unknown")
    limited = cgroup.available_memory()
    found = f"{size(available)} of {size(total)} available"
    return ok("memory", found if limited is None else f"{found}; the container may take {size(limited)}")


def _swap(fields: dict[str, int]) -> Finding:
    used = fields.get("SwapTotal", 0) - fields.get("SwapFree", 0)
    if used <= fields.get("MemTotal", 0) // 100:
        return ok("swap", f"{size(used)} used")
    return warning(
        "swap",
        f"{size(used)} used",
        "memory was short: weights or KV blocks that were swapped out are read back during a step",
        "find the largest process (ps aux --sort=-rss), or lower --kv-cache-memory-bytes; then swapoff -a && swapon -a",
    )


def _transparent_huge_pages(host: Host) -> Finding:
    """Checks transparent huge pages. Guides for databases turn them off; a KV cache is read in long runs and gains
    (docs of `kv_cache.zeros`)."""
    text = host.read("/sys/kernel/mm/transparent_hugepage/enabled")
    if text is None:
        return absent("huge pages", "the kernel has no transparent huge pages")
    if "[never]" not in text:
        return ok("huge pages", f"transparent: {text}")
    return warning(
        "huge pages",
        f"transparent: {text}",
        "the KV cache of a CPU requests them; without, attention is up to 9 % slower. Advice to turn them off is meant "
        "for stores of small records",
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
    )


def _reserved_huge_pages(fields: dict[str, int]) -> Finding:
    num_free = fields.get("HugePages_Free", 0)
    num_bytes = num_free * fields.get("Hugepagesize", 0)
    if not num_bytes:
        return ok("reserved huge pages", "none are idle")
    return note(
        "reserved huge pages",
        f"{num_free} lie idle, {size(num_bytes)}",
        "no process can use this memory; Pagewire only uses transparent huge pages",
        "unless another program needs them: sysctl vm.nr_hugepages=0",
    )


def _overcommit(host: Host) -> Finding:
    if host.number("/proc/sys/vm/overcommit_memory") != 2:
        return ok("overcommit", "address space may exceed memory")
    return problem(
        "overcommit",
        "vm.overcommit_memory is 2",
        "the KV cache of a CPU reserves address space at once, but memory as it fills: here all of it counts from the "
        "start, and forks fail",
        "sysctl vm.overcommit_memory=0",
    )


def _maps(host: Host) -> Finding:
    """Checks the limit of maps. Guides recommend 262144; an executor has some hundred maps."""
    count = host.number("/proc/sys/vm/max_map_count")
    if count is None or count >= _FEWEST_MAPS:
        return ok("map count", "unknown" if count is None else f"{count} maps of memory for a process, enough")
    return warning(
        "map count",
        f"{count} maps of memory for a process",
        "checkpoints of many files and CUDA map memory piece by piece",
        f"sysctl vm.max_map_count={_FEWEST_MAPS}",
    )


def _shared_memory(host: Host, config: ServeConfig) -> Finding:
    """Checks /dev/shm. Ranks on CPUs exchange rows through their own memory files (memfd); NCCL uses /dev/shm."""
    ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    shared = host.size_of("/dev/shm")
    if ranks == 1 or config.device == "cpu" or shared is None:
        return ok("/dev/shm", "not needed" if shared is None else f"{size(shared)}; one process per model needs none")
    if shared >= _SHM_FOR_NCCL:
        return ok("/dev/shm", size(shared))
    return warning(
        "/dev/shm",
        f"{size(shared)}, for {ranks} ranks",
        "NCCL passes data between GPUs without a direct link through it, and ends with a bus error when it is full",
        "docker run --ipc=host, or --shm-size=1g",
    )
