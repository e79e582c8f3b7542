"""How much memory the device has, and the error for what does not fit into it."""

from __future__ import annotations

from pathlib import Path

import torch

from pagewire import cgroup
from pagewire.errors import StartupError


class OutOfMemoryError(StartupError):
    """The model or its KV cache does not fit; the message has both numbers and the remedy."""


def mib(num_bytes: int) -> str:
    return f"{num_bytes / 1024**2:.1f} MiB"


def available_cpu_bytes() -> int:
    """Memory that can be had without swapping, within the limit of the container or unit this runs in."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limited = cgroup.available_memory()
    return available if limited is None else min(available, limited)


def available_bytes(device: torch.device) -> int:
    return available_cpu_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


def check_weights_fit(weight_bytes: int, device: torch.device) -> None:
    """Raises OutOfMemoryError before memory is taken for weights that cannot fit."""
    available = available_bytes(device)
    if weight_bytes > available:
        raise OutOfMemoryError(
            f"the weights need {mib(weight_bytes)}, {device} has {mib(available)} free: use a smaller model or "
            "--dtype bfloat16, or a larger device"
        )


def check_kv_cache_fits(num_bytes: int, device: torch.device, flag: str) -> None:
    """Raises OutOfMemoryError for a cache of a size that `flag` asks for and the device does not have.

    On the CPU pages are only handed out when they are touched: too large a cache would end the process under load.
    """
    available = available_bytes(device)
    if num_bytes > available:
        raise OutOfMemoryError(
            f"the KV cache would be {mib(num_bytes)}, {device} has {mib(available)} free: lower {flag}"
        )
