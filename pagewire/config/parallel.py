"""Flags of an executor that consists of several processes."""

from dataclasses import dataclass

from pagewire.config.fields import Range, flag


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The division of one copy of the model among devices."""

    tensor_parallel_size: int = flag(
        1,
        "devices that share every layer, each with its own process; on a CPU, the processes share the cores",
        group="executor",
        valid=Range(minimum=1, maximum=1024),
        short="tp",
    )
    enable_expert_parallel: bool = flag(
        False,
        "with --tensor-parallel-size, give each device some whole experts instead of a part of every expert",
        group="executor",
        short="ep",
    )
    pipeline_parallel_size: int = flag(
        1,
        "stages of the layers, each on its own devices (--tensor-parallel-size); the stages compute different steps at "
        "the same time",
        group="executor",
        valid=Range(minimum=1, maximum=1024),
        short="pp",
    )
    distributed_executor_backend: str = flag(
        "mp",
        "how executors and their processes are started; mp: on this machine, ray: as actors on the nodes of a Ray "
        "cluster, external: by the operator, each process with --rank and --leader",
        group="executor",
        choices=("mp", "ray", "external"),
    )
    rank: int = flag(
        0,
        "with --distributed-executor-backend external, the number of this process, from 0; rank 0, the leader, serves "
        "gRPC, and the others only compute",
        group="executor",
        valid=Range(minimum=0, maximum=65535),
    )
    leader: str = flag(
        "",
        "with --distributed-executor-backend external, the address of the leader, host:port, or unix:/path if all "
        "ranks are on one machine",
        group="executor",
    )
    group_secret: str | None = flag(
        None,
        "with --leader host:port, a secret that all processes of the group share",
        group="executor",
        secret=True,
    )

    @property
    def starts_followers(self) -> bool:
        """True if this process starts the other processes of its executor. An actor of Ray does, too."""
        return self.num_ranks > 1 and self.rank == 0 and self.distributed_executor_backend != "external"

    @property
    def num_ranks(self) -> int:
        """The number of processes of one executor."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
