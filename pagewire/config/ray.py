"""Flags of executors on a Ray cluster."""

from dataclasses import dataclass

from pagewire.config.executor import ExecutorConfig
from pagewire.config.fields import Range, flag


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """The number of executors, and the cluster."""

    data_parallel_size: int = flag(
        1,
        "executors, each with the whole model and its own KV cache; on CUDA, each has its own device, on a CPU, its "
        "share of cores and memory",
        group="executor",
        valid=Range(minimum=1, maximum=1024),
        short="dp",
    )
    ray_address: str | None = flag(
        None,
        "Ray cluster that runs the executors, HOST:PORT of its head; local: a new cluster on this machine (default: "
        "RAY_ADDRESS, else the cluster of this machine, else local)",
        group="executor",
    )


@dataclass(frozen=True, kw_only=True)
class RayExecutorsConfig(RayConfig, ExecutorConfig):
    """Keeps executors running as actors of a Ray cluster, and writes a file of their addresses for the scheduler."""

    address_file: str = flag(
        "executors.txt",
        "file for the addresses of the executors, one a line; the scheduler reads it with --executor-discovery file "
        "and --executor-address FILE",
        group="network",
    )
