"""Limits of the control group (container, systemd unit) that this process runs in; cgroup v1 and v2.

A group is bound by its own limits and by those of every group above it. Formats:
https://docs.kernel.org/admin-guide/cgroup-v2.html and https://docs.kernel.org/admin-guide/cgroup-v1/
"""

from collections.abc import Iterator
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
_SELF = Path("/proc/self/cgroup")
# Version 1 expresses "no limit" by the largest number of whole pages.
_NO_LIMIT = 2**62


def cpu_quota(mount: Path = _MOUNT, own: Path = _SELF) -> float | None:
    """Returns the processor time per second that this process may use, for instance 1.5; None without a limit."""
    quotas = []
    for group in groups("cpu", mount, own):
        if (limit := _read(group / "cpu.max")) is not None:
            quota, _, period = limit.partition(" ")
        else:
            quota, period = _read(group / "cpu.cfs_quota_us") or "-1", _read(group / "cpu.cfs_period_us") or "0"
        if quota not in ("max", "-1") and int(period) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def available_memory(mount: Path = _MOUNT, own: Path = _SELF) -> int | None:
    """Returns the bytes that this process can still allocate before it reaches a limit; None without a limit.

    File pages that were not used recently count as free: the kernel drops them before it refuses memory.
    """
    available = []
    for group in groups("memory", mount, own):
        limit = _read(group / "memory.max") or _read(group / "memory.limit_in_bytes")
        used = _read(group / "memory.current") or _read(group / "memory.usage_in_bytes")
        if limit is None or limit == "max" or used is None or int(limit) >= _NO_LIMIT:
            continue
        available.append(max(0, int(limit) - int(used) + _inactive_file(group)))
    return min(available, default=None)


def free_memory() -> int:
    """Returns the bytes that are available without swapping, within the limit of this container or unit."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available, limited = int(fields["MemAvailable"].split()[0]) * 1024, available_memory()
    return available if limited is None else min(available, limited)


def _inactive_file(group: Path) -> int:
    fields = dict(line.split(" ", 1) for line in (_read(group / "memory.stat") or "").splitlines())
    # Version 1 includes the groups below only in its totals.
    return int(fields.get("total_inactive_file", fields.get("inactive_file", "0")))


def groups(controller: str, mount: Path, own: Path) -> Iterator[Path]:
    """Yields the directories of this process's group and of all visible groups above it.

    A container sees its own group as the mount itself, while /proc may show the path on the host.
    """
    for line in (_read(own) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):  # version 1
            root = mount / controller
        elif not controllers:  # version 2
            root = mount
        else:
            continue
        group = root / path.lstrip("/")
        yield from (directory for directory in (group, *group.parents) if directory.is_relative_to(root))


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
