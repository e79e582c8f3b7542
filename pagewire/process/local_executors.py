"""The executors of a local stack: their names, and the part of the machine that each of them gets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagewire.config import ExecutorConfig, ServeConfig
from pagewire.errors import StartupError
from pagewire.process.binding import CpuBinding

_VISIBLE = "CUDA_VISIBLE_DEVICES"
# Has one entry for each device.
_DRIVER = Path("/proc/driver/nvidia/gpus")


def names(config: ServeConfig) -> list[str]:
    """Returns the names of the executors on this machine; a single one is "executor". Raises StartupError."""
    count = config.data_parallel_size
    if config.distributed_executor_backend == "external":
        raise StartupError(
            "--distributed-executor-backend external: `pagewire serve` starts its executors itself; start them with "
            "`pagewire executor`, and the other services one by one"
        )
    if config.distributed_executor_backend == "ray":
        return []
    return ["executor"] if count == 1 else [f"executor-{number}" for number in range(count)]


def roles(config: ServeConfig) -> list[str]:
    """Returns the role of each executor on this machine."""
    of_others = "decode" if config.prefill_executors else "both"
    return ["prefill" if i < config.prefill_executors else of_others for i in range(len(names(config)))]


def part(config: ServeConfig, listen: str, place: CpuBinding | None = None, role: str = "both") -> ExecutorConfig:
    """Returns the configuration of one executor. Flags about threads and memory apply to each executor.

    place: its processors and NUMA node, if they are bound.
    """
    share = 1 / config.data_parallel_size
    where: dict[str, Any] = {} if place is None else place.flags
    executor: ExecutorConfig = config.part(
        ExecutorConfig, listen=listen, metrics_port=None, cpu_share=share, role=role, **where
    )
    return executor


def devices(
    config: ServeConfig, environ: Mapping[str, str] = os.environ, driver: Path = _DRIVER
) -> list[dict[str, str]]:
    """Returns the variables that give each executor its devices; {} for a single executor, or on a CPU.

    Raises StartupError if there are too few devices.
    """
    count, each = len(names(config)), config.num_ranks
    visible = environ.get(_VISIBLE)
    if visible is not None:
        present = [one for one in visible.split(",") if one.strip() not in ("", "-1")]
    else:
        present = [str(number) for number in range(len(list(driver.iterdir())) if driver.is_dir() else 0)]
    if count * each <= 1 or config.device == "cpu" or not present:
        return [{} for _ in range(count)]
    if len(present) < count * each:
        raise StartupError(
            f"--data-parallel-size {count}{f' x {each}' if each > 1 else ''} needs {count * each} CUDA devices, and "
            f"this machine has {len(present)}: start fewer executors, or run them on --device cpu"
        )
    return [{_VISIBLE: ",".join(present[first : first + each])} for first in range(0, count * each, each)]
