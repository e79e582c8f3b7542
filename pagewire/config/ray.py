"""Flags of executors that Ray places."""

from dataclasses import dataclass

from pagewire.config.executor import ExecutorConfig
from pagewire.config.fields import Range, flag


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """How many executors, and on which cluster."""

    data_parallel_size: int = flag(
        1,
        "executors, each with the whole model and a KV cache of its own; on CUDA each with a device of its own, on a "
        "CPU each with its share of cores and memory",
        group="executor",
        valid=Range(minimum=1, maximum=1024),
        short="dp",
    )
    ray_address: str | None = flag(
        None,
        "Ray cluster that runs the executors, HOST:PORT of its head; local = one of this machine alone, started for it "
        "(default: RAY_ADDRESS, else the cluster that this machine is part of, else local)",
        group="executor",
    )


@dataclass(frozen=True, kw_only=True)
class RayExecutorsConfig(RayConfig, ExecutorConfig):
    """Keeps executors running as actors of a Ray cluster, for a scheduler that follows the file of their addresses."""

    address_file: str = flag(
        "executors.txt",
        "file that is kept to say where they are, one address a line (the scheduler's --executor-address, with "
        "--executor-discovery file)",
        group="network",
    )
