"""NVIDIA GPUs, as the driver's own program describes them (`nvidia-smi --help-query-gpu`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pagewire.config import ServeConfig
from pagewire.tools.doctor.finding import Finding, Findings, absent, note, ok, problem, warning
from pagewire.tools.doctor.host import Host, size

_FIELDS = (
    "index",
    "name",
    "driver_version",
    "pci.bus_id",
    "compute_cap",
    "memory.total",
    "memory.used",
    "persistence_mode",
    "compute_mode",
    "mig.mode.current",
    "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total",
    "power.limit",
    "power.default_limit",
    "clocks.current.sm",
    "clocks.max.sm",
    "clocks_event_reasons.hw_slowdown",
    "clocks_event_reasons.sw_thermal_slowdown",
    "temperature.gpu",
    "pcie.link.width.current",
    "pcie.link.width.max",
)
# Drivers before 535 have other names for these.
_OLDER = ("clocks_event_reasons", "clocks_throttle_reasons")
# Least major version of the driver for a major version of CUDA:
# https://docs.nvidia.com/cuda/cuda-toolkit-release-notes, "CUDA Toolkit and Minimum Required Driver Version".
_DRIVER_OF_CUDA = {11: 450, 12: 525, 13: 580}
_LEAST_CAPABILITY = 8.0
_MUCH_USED = 0.05


@dataclass(frozen=True)
class Gpu:
    values: Mapping[str, str]

    @property
    def name(self) -> str:
        return f"GPU {self.values['index']}"

    def text(self, field: str) -> str:
        return self.values[field]

    def number(self, field: str) -> float | None:
        """Returns the number; None if the driver reports [N/A]."""
        try:
            return float(self.values[field])
        except ValueError:
            return None


def gpus(host: Host) -> list[Gpu]:
    text = _query(host, _FIELDS) or _query(host, [field.replace(*_OLDER) for field in _FIELDS])
    rows = [[cell.strip() for cell in line.split(",")] for line in (text or "").splitlines()]
    return [Gpu(dict(zip(_FIELDS, row, strict=True))) for row in rows if len(row) == len(_FIELDS)]


def _query(host: Host, fields: Sequence[str]) -> str | None:
    """Queries fields. nvidia-smi returns nothing at all if it does not know one of them."""
    return host.run("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")


def node_of(host: Host, gpu: Gpu) -> int | None:
    """Returns the NUMA node of a GPU, found by its bus address: lspci lists data-center GPUs as "3D controller", not
    VGA. None if unknown, or with a single node."""
    domain, _, rest = gpu.text("pci.bus_id").lower().partition(":")
    node = host.number(f"/sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node")
    return None if node is None or node < 0 else node


def check_gpus(host: Host, config: ServeConfig) -> Findings:
    found = gpus(host)
    if not found:
        yield _none(host, config)
        return
    yield _driver(found[0])
    yield _count(found, config)
    for gpu in found:
        yield from _one(host, gpu)
    if config.tensor_parallel_size > 1:
        yield _links(host)


def _none(host: Host, config: ServeConfig) -> Finding:
    has_device = bool(host.glob("/dev/nvidia[0-9]*"))
    if has_device or host.read("/proc/driver/nvidia/version"):
        return warning(
            "GPU",
            "a driver is loaded, but nvidia-smi fails",
            "the driver's programs are missing in this container, or their version is not that of the driver's module",
            "NVIDIA's container toolkit with --gpus all; or restart the machine if the driver was updated",
        )
    if config.device == "cuda":
        return problem(
            "GPU", "none is visible, and --device is cuda", "the executor ends at start", "--device cpu, or --gpus all"
        )
    return absent("GPU", "none is visible; models run on the CPU")


def _driver(gpu: Gpu) -> Finding:
    driver = gpu.text("driver_version")
    try:
        import torch

        version = torch.version.cuda
    except ImportError:
        version = None
    if version is None:
        return warning(
            "driver",
            f"{driver}, but the installed torch is not for CUDA",
            "the executor does not see the GPUs",
            "pip install torch==2.13.0 from PyTorch's index for CUDA (docs/gpu.md)",
        )
    needed = _DRIVER_OF_CUDA.get(int(version.partition(".")[0]), 0)
    if int(driver.partition(".")[0]) >= needed:
        return ok("driver", f"{driver}, for torch with CUDA {version}")
    return problem(
        "driver",
        f"{driver}, but torch is for CUDA {version}",
        f"CUDA {version} needs a driver of version {needed} or later",
        "update the driver, or install a torch for an older CUDA",
    )


def _count(found: list[Gpu], config: ServeConfig) -> Finding:
    needed = config.data_parallel_size * config.pipeline_parallel_size * config.tensor_parallel_size
    if needed <= len(found) or config.distributed_executor_backend == "ray":
        return ok("GPUs", f"{len(found)} visible, {needed} used")
    return problem(
        "GPUs",
        f"{len(found)} visible, but the flags require {needed}",
        "executors end at start",
        "--tensor-parallel-size, --pipeline-parallel-size and --data-parallel-size multiply: lower one",
    )


def _one(host: Host, gpu: Gpu) -> Findings:
    yield _memory(gpu)
    yield _capability(gpu)
    yield _persistence(gpu)
    yield _sharing(gpu)
    yield _ecc(gpu)
    yield _clocks(gpu)
    yield _power(gpu)
    yield _bus(host, gpu)


def _memory(gpu: Gpu) -> Finding:
    total, used = (gpu.number("memory.total") or 0.0) * 2**20, (gpu.number("memory.used") or 0.0) * 2**20
    found = f"{gpu.name} ({gpu.text('name')}): {size(used)} of {size(total)} in use"
    if total and used / total <= _MUCH_USED:
        return ok("GPU memory", found)
    return note(
        "GPU memory",
        found,
        "by a running stack or other programs: an executor has that much less for its KV cache",
        "nvidia-smi lists processes",
    )


def _capability(gpu: Gpu) -> Finding:
    capability = gpu.number("compute_cap") or 0.0
    if capability >= _LEAST_CAPABILITY:
        return ok("GPU kind", f"{gpu.name}: compute capability {capability}")
    return problem(
        "GPU kind", f"{gpu.name}: compute capability {capability}", "kernels need 8.0 (Ampere) or above", "--device cpu"
    )


def _persistence(gpu: Gpu) -> Finding:
    if gpu.text("persistence_mode") != "Disabled":
        return ok("persistence", f"{gpu.name}: on")
    return note(
        "persistence",
        f"{gpu.name}: off",
        "the driver unloads when the last process ends: a restarted executor waits some seconds for it",
        "nvidia-smi -pm 1 (as root), or the nvidia-persistenced service",
    )


def _sharing(gpu: Gpu) -> Finding:
    mode = gpu.text("compute_mode")
    if gpu.text("mig.mode.current") == "Enabled":
        return note(
            "GPU sharing", f"{gpu.name}: MIG", "an executor sees one instance of it", "CUDA_VISIBLE_DEVICES=MIG-..."
        )
    if mode in ("Default", "[N/A]"):
        return ok("GPU sharing", f"{gpu.name}: compute mode {mode}")
    return warning(
        "GPU sharing",
        f"{gpu.name}: compute mode {mode}",
        "only one process may use it: an executor that replaces another cannot start before that one has ended",
        "nvidia-smi -c 0",
    )


def _ecc(gpu: Gpu) -> Finding:
    """Checks ECC. Guides turn it off for bandwidth: on HBM this gains nothing, elsewhere a few percent, with wrong
    tokens."""
    errors = gpu.number("ecc.errors.uncorrected.volatile.total") or 0
    if errors:
        return problem(
            "ECC",
            f"{gpu.name}: {errors:g} uncorrectable errors",
            "memory gives wrong values: processes are ended, or tokens are wrong",
            "drain it, reset it, and have it replaced if errors recur",
        )
    mode = gpu.text("ecc.mode.current")
    meaning = "bit errors stay undetected; the gain is a few percent on GDDR memory, and nothing on HBM"
    if mode == "Disabled":
        return note("ECC", f"{gpu.name}: off", meaning, "nvidia-smi -e 1, then restart")
    return ok("ECC", f"{gpu.name}: {'on' if mode == 'Enabled' else mode}, no errors")


def _clocks(gpu: Gpu) -> Finding:
    kinds = ("hw_slowdown", "sw_thermal_slowdown")
    slow = [kind for kind in kinds if gpu.text(f"clocks_event_reasons.{kind}") == "Active"]
    clock, most, heat = (gpu.text(field) for field in ("clocks.current.sm", "clocks.max.sm", "temperature.gpu"))
    found = f"{gpu.name}: {clock} of {most} MHz, {heat} °C"
    if not slow:
        return ok("GPU clocks", found)
    return warning(
        "GPU clocks",
        f"{found}, {', '.join(slow)}",
        "the GPU throttles because of heat or insufficient power",
        "cooling and power supply; nvidia-smi -q -d PERFORMANCE",
    )


def _power(gpu: Gpu) -> Finding:
    limit, default = gpu.number("power.limit"), gpu.number("power.default_limit")
    if limit is None or default is None or limit >= default:
        return ok("GPU power", f"{gpu.name}: limit {gpu.text('power.limit')} W, its default")
    return note(
        "GPU power",
        f"{gpu.name}: limit {limit:g} W, by default {default:g} W",
        "prompts are computed more slowly; decodes wait for memory, and lose little",
        f"nvidia-smi -pl {default:g}, if the lower limit is not intended",
    )


def _bus(host: Host, gpu: Gpu) -> Finding:
    width, most = gpu.text("pcie.link.width.current"), gpu.text("pcie.link.width.max")
    node = node_of(host, gpu)
    found = f"{gpu.name}: {width} of {most} lanes" + (f", NUMA node {node}" if node is not None else "")
    if width != most:
        return warning(
            "PCIe",
            found,
            "loading weights is slower, and so are sums over GPUs without NVLink",
            "the slot, the riser, or the board's lane settings",
        )
    return ok("PCIe", found)


def _links(host: Host) -> Finding:
    text = host.run("nvidia-smi", "topo", "-m")
    if text is None:
        return absent("links", "nvidia-smi topo -m fails")
    rows = [line.split() for line in text.splitlines() if re.match(r"GPU\d+\s", line)]
    links = {cell for row in rows for cell in row[1 : 1 + len(rows)] if cell != "X"}
    if links and all(link.startswith("NV") for link in links):
        return ok("links", f"NVLink between all GPUs ({', '.join(sorted(links))})")
    return note(
        "links",
        f"between GPUs: {', '.join(sorted(links)) or 'none'}",
        "without NVLink, the two sums of each layer go over PCIe: more than two ranks may cost more than they gain",
        "--pipeline-parallel-size, or a replica per GPU (--data-parallel-size) if the model fits into one",
    )
