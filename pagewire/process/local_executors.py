"""The executors of a local stack: their names, and what of the machine each of them gets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagewire.config import ExecutorConfig, ServeConfig
from pagewire.errors import StartupError
from pagewire.process.binding import Place

_VISIBLE = "CUDA_VISIBLE_DEVICES"
# One entry for each device that the driver has.
_DRIVER = Path("/proc/driver/nvidia/gpus")


def names(config: ServeConfig) -> list[str]:
    """Of those that are processes of this machine. One alone is "executor". Raises StartupError."""
    count = config.data_parallel_size
    if config.distributed_executor_backend == "external":
        raise StartupError(
            "--distributed-executor-backend external: `pagewire serve` starts its executors itself; start them with "
            "`pagewire executor`, and the other services one by one"
        )
    if config.distributed_executor_backend == "ray":
        return []
    return ["executor"] if count == 1 else [f"executor-{number}" for number in range(count)]


def part(config: ServeConfig, listen: str, place: Place | None = None) -> ExecutorConfig:
    """The configuration of one of them. What the user says of threads and memory holds for each. place: where its
    processes run, if that is said."""
    share = 1 / config.data_parallel_size
    where: dict[str, Any] = {} if place is None else place.flags
    executor: ExecutorConfig = config.part(ExecutorConfig, listen=listen, metrics_port=None, cpu_share=share, **where)
    return executor


def devices(
    config: ServeConfig, environ: Mapping[str, str] = os.environ, driver: Path = _DRIVER
) -> list[dict[str, str]]:
    """What the environment of each says of devices; nothing where they are one, or run on a CPU.

    Raises StartupError if there are too few.
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
            f"--data-parallel-size {count}{f' x {each}' if each > 1 else ''} takes {count * each} CUDA devices, "
            f"{len(present)} are here: start fewer executors, or run them on --device cpu"
        )
    return [{_VISIBLE: ",".join(present[first : first + each])} for first in range(0, count * each, each)]
