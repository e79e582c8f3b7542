"""Profiles (`--profile`): values of flags for one purpose, which every other source overrides.

The values were measured on two CPU cores; those for CUDA are not measured yet. They are written as on a command line; a
service ignores flags that it does not have.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# Linux, Windows's subsystem for it, and Jetson.
_DRIVERS = tuple(map(Path, ("/proc/driver/nvidia/version", "/usr/lib/wsl/lib/libcuda.so.1", "/dev/nvmap")))


@dataclass(frozen=True)
class Profile:
    """Values by field: on every device, and those that differ on a CPU and on CUDA."""

    name: str
    purpose: str  # one line
    everywhere: Mapping[str, str] = field(default_factory=dict)
    on_cpu: Mapping[str, str] = field(default_factory=dict)
    on_cuda: Mapping[str, str] = field(default_factory=dict)

    def values(self, device: str = "auto") -> dict[str, str]:
        """Returns all values for a device, named as for --device."""
        return {**self.everywhere, **(self.on_cuda if runs_on_cuda(device) else self.on_cpu)}


def runs_on_cuda(device: str) -> bool:
    """Returns whether a value of --device means CUDA on this machine, as far as it is known without torch."""
    return device == "cuda" or (device == "auto" and has_nvidia_driver() and not _computes_on_cpu())


def has_nvidia_driver() -> bool:
    """Returns whether the machine has NVIDIA's driver. It avoids torch, which takes a second to load."""
    return any(map(Path.exists, _DRIVERS))


def _computes_on_cpu() -> bool:
    """Returns whether torch sees no GPU in spite of a driver: none is visible, or it is a build for CPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (visible is not None and visible.strip() in ("", "-1")) or "+cpu" in _torch_version()


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


_ALL = (
    Profile(
        "latency",
        "early first tokens and early refusals, by short steps",
        {
            "max_num_seqs": "64",
            "max_queue_time": "5",
            "enable_prefix_caching": "true",
        },
        on_cpu={"max_num_batched_tokens": "512"},
        on_cuda={"max_num_batched_tokens": "4096"},
    ),
    Profile(
        "throughput",
        "as many tokens per second as possible in batches, however long a request waits",
        {
            "target_itl_ms": "0",
            "max_waiting_requests": "65536",
            "max_queue_time": "0",
            "enable_prefix_caching": "true",
        },
        on_cpu={"max_num_seqs": "256"},
        on_cuda={"max_num_seqs": "512", "max_num_batched_tokens": "16384", "gpu_memory_utilization": "0.95"},
    ),
    Profile(
        "cost",
        "less memory, by an fp8 KV cache (less exact) if the model supports it, fewer requests at once",
        {
            "kv_cache_dtype": "smallest",
            "grammar_cache_size": "64",
            "mm_encoder_cache_bytes": "64MiB",
            "enable_prefix_caching": "true",
        },
        on_cpu={"max_num_seqs": "64", "max_num_batched_tokens": "512"},
        on_cuda={"max_num_seqs": "128", "max_num_batched_tokens": "2048", "gpu_memory_utilization": "0.97"},
    ),
)
# By name, and by other names for the same purpose.
_OTHERS = {"online": "latency", "batch": "throughput"}
PROFILES: dict[str, Profile] = {profile.name: profile for profile in _ALL}
PROFILES |= {name: PROFILES[same] for name, same in _OTHERS.items()}
