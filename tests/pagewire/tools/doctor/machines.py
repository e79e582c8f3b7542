"""Records of machines, as the doctor reads them: files of /proc and /sys, and what nvidia-smi says."""

from collections.abc import Mapping
from pathlib import Path

from pagewire.process.cpu_sets import cpu_set
from pagewire.tools.doctor.gpu import _FIELDS
from pagewire.tools.doctor.host import Host

_SYS_CPU = "/sys/devices/system/cpu"
_THP = "/sys/kernel/mm/transparent_hugepage/enabled"

GPU = {
    "index": "0",
    "name": "NVIDIA H100 80GB HBM3",
    "driver_version": "580.65.06",
    "pci.bus_id": "00000000:17:00.0",
    "compute_cap": "9.0",
    "memory.total": "81559",
    "memory.used": "1",
    "persistence_mode": "Enabled",
    "compute_mode": "Default",
    "mig.mode.current": "Disabled",
    "ecc.mode.current": "Enabled",
    "ecc.errors.uncorrected.volatile.total": "0",
    "power.limit": "700.00",
    "power.default_limit": "700.00",
    "clocks.current.sm": "1980",
    "clocks.max.sm": "1980",
    "clocks_event_reasons.hw_slowdown": "Not Active",
    "clocks_event_reasons.sw_thermal_slowdown": "Not Active",
    "temperature.gpu": "31",
    "pcie.link.width.current": "16",
    "pcie.link.width.max": "16",
}
TOPOLOGY = {
    "NVLink": "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV18\t0-3\nGPU1\tNV18\t X \t4-7\n",
    "PCIe": "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tSYS\t0-3\nGPU1\tSYS\t X \t4-7\n",
}


class RecordedHost(Host):
    """A recorded machine: `files` by path, outputs of `commands` by their words, and the cpus, quota and descriptors of
    a process."""

    def __init__(
        self,
        root: Path,
        files: Mapping[str, str],
        *,
        commands: Mapping[str, str] | None = None,
        cpus: str = "0-7",
        quota: float | None = None,
        descriptors: int = 1 << 20,
    ) -> None:
        super().__init__(root)
        for path, text in files.items():
            file = root / path.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")
        self._commands, self._cpus, self._quota, self._descriptors = commands or {}, cpus, quota, descriptors

    def run(self, *command: str) -> str | None:
        return next((text for words, text in self._commands.items() if words in " ".join(command)), None)

    def usable_cpus(self) -> set[int]:
        return set(cpu_set(self._cpus))

    def cpu_quota(self) -> float | None:
        return self._quota

    def descriptor_limit(self) -> int:
        return self._descriptors


def good(**other: str) -> dict[str, str]:
    """A machine with nothing to find; other: files, of which an empty one is not there."""
    files = {
        "/proc/cpuinfo": "model name\t: AMD EPYC 9654\nflags\t\t: fpu avx2 avx512_vnni avx512_bf16",
        "/proc/loadavg": "0.10 0.20 0.30 1/200 999",
        "/proc/stat": "cpu  1000 0 1000 8000 0 0 0 0 0 0",
        "/proc/meminfo": "MemTotal: 65536000 kB\nMemAvailable: 60000000 kB\nSwapTotal: 1000 kB\nSwapFree: 1000 kB",
        "/proc/sys/vm/overcommit_memory": "0",
        "/proc/sys/vm/max_map_count": "65530",
        "/proc/sys/net/core/somaxconn": "4096",
        "/proc/sys/net/core/rmem_max": "212992",
        "/proc/sys/net/core/wmem_max": "212992",
        _THP: "always [madvise] never",
        f"{_SYS_CPU}/online": "0-7",
        f"{_SYS_CPU}/cpu0/cpufreq/scaling_governor": "performance",
        f"{_SYS_CPU}/cpu0/cpufreq/scaling_driver": "acpi-cpufreq",
        "/sys/devices/system/node/node0/cpulist": "0-7",
    }
    files |= {f"{_SYS_CPU}/cpu{n}/topology/thread_siblings_list": str(n) for n in range(8)}
    return {path: text for path, text in (files | other).items() if text}


def smi(*changes: Mapping[str, str], topology: str = "NVLink") -> dict[str, str]:
    """Commands of a machine with a GPU for each set of changes to `GPU`."""
    rows = [GPU | {"index": str(index)} | dict(change) for index, change in enumerate(changes)]
    query = "\n".join(", ".join(row[field] for field in _FIELDS) for row in rows) + "\n"
    return {"--query-gpu": query, "topo -m": TOPOLOGY[topology]}
