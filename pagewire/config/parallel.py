"""Flags of an executor that consists of several processes."""

from collections.abc import Callable
from dataclasses import dataclass

from pagewire.config.fields import Range, flag

_MOST_RANKS = 64  # suggested in errors


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
    disable_custom_all_reduce: bool = flag(
        False,
        "send small sums of several GPUs through NCCL, too, instead of memory that they share",
        group="executor",
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


def heads_refusal(ranks: int, heads: int, kv_heads: int) -> str | None:
    """Returns why so many ranks cannot share these heads; None if they can."""
    fits = lambda size: heads % size == 0 and 0 in (kv_heads % size, size % kv_heads)  # noqa: E731
    why = f"{heads} heads with {kv_heads} of keys and values cannot be split"
    return None if fits(ranks) else ranks_refusal(ranks, why, fits)


def ranks_refusal(ranks: int, reason: str, fits: Callable[[int], bool]) -> str:
    """Returns the sentence for a number of ranks, which names the possible numbers. fits: whether one is possible."""
    others = [str(size) for size in range(1, _MOST_RANKS + 1) if fits(size)]
    return f"--tensor-parallel-size {ranks}: {reason}; possible are {', '.join(others)}"
