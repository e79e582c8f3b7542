"""Flags of an executor that is a group of processes."""

from dataclasses import dataclass

from pagewire.config.fields import Range, flag


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How one copy of the model is spread over devices."""

    tensor_parallel_size: int = flag(
        1,
        "devices that share every layer, each in a process of its own; on a CPU they share the cores",
        group="executor",
        valid=Range(minimum=1, maximum=1024),
        short="tp",
    )
    enable_expert_parallel: bool = flag(
        False,
        "with --tensor-parallel-size, of a model with experts: each device has whole ones, some of them, instead of a "
        "part of every one",
        group="executor",
        short="ep",
    )
    pipeline_parallel_size: int = flag(
        1,
        "stages that the layers are divided into, each with devices of its own (--tensor-parallel-size), which compute "
        "as many steps at the same time",
        group="executor",
        valid=Range(minimum=1, maximum=1024),
        short="pp",
    )
    distributed_executor_backend: str = flag(
        "mp",
        "who starts executors and their processes: mp = who needs them, here; ray = a Ray cluster, executors as actors "
        "on any of its nodes; external = somebody else, each process with --rank and --leader",
        group="executor",
        choices=("mp", "ray", "external"),
    )
    rank: int = flag(
        0,
        "with --distributed-executor-backend external: which of the processes this is, from 0; rank 0, the leader, "
        "serves gRPC, the others only compute",
        group="executor",
        valid=Range(minimum=0, maximum=65535),
    )
    leader: str = flag(
        "",
        "with --distributed-executor-backend external: where the leader listens and the others find it, host:port, or "
        "unix:/path where all are on one machine",
        group="executor",
    )
    group_secret: str | None = flag(
        None,
        "with --leader host:port: what all processes of the group know, and nobody else",
        group="executor",
        secret=True,
    )

    @property
    def starts_followers(self) -> bool:
        """Whether this process is to start the others of its executor. An actor of Ray's does, too."""
        return self.num_ranks > 1 and self.rank == 0 and self.distributed_executor_backend != "external"

    @property
    def num_ranks(self) -> int:
        """Processes of one executor."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
