"""The formation of a group: checks of what ranks must have in common, and the communicators between them."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

from pagewire.config import ExecutorConfig
from pagewire.errors import StartupError
from pagewire.services.executor import stats
from pagewire.services.executor.parallel.group import Failure, Group
from pagewire.services.executor.parallel.peer_sums import share_memory
from pagewire.services.executor.parallel.pipe import Pipes
from pagewire.services.executor.parallel.shared_memory import SharedMemory
from pagewire.services.executor.parallel.stage import WHOLE, Stage
from pagewire.services.executor.parallel.torch_distributed import TorchCommunicator
from pagewire.services.executor.ranks.link import host_of, is_local
from pagewire.services.executor.ranks.piping import pipes_through_torch
from pagewire.services.executor.ranks.tls_link import has_tls
from pagewire.services.executor.start.startup import resolve_device

# Flags that may differ between ranks. The model may: its weights are compared once they are read.
_OWN_FLAGS = frozenset(
    {
        "rank",
        "leader",
        "group_secret",
        "distributed_executor_backend",
        "listen",
        "metrics_port",
        "admin_host",
        "log_level",
        "log_format",
        "otlp_traces_endpoint",
        "shutdown_timeout",
        "hang_timeout",
        "ssl_certfile",
        "ssl_keyfile",
        "ssl_ca_certs",
        "ssl_cert_reqs",
        "model",
        "revision",
        "download_dir",
        "weights_cache",
        "num_threads",
        "cpu_share",
        "cpu_bind",
        "numa_bind",
    }
)
# Channels in shared memory. _TENSOR: two for each stage, the second for weights that are read.
_WORLD, _LOADING, _TENSOR = range(3)


def common_flags(config: ExecutorConfig) -> dict[str, str]:
    """Returns the flags that all ranks must have in common, by --name."""
    return {
        "--" + field.name.replace("_", "-"): str(getattr(config, field.name))
        for field in dataclasses.fields(ExecutorConfig)
        if field.name not in _OWN_FLAGS
    }


def secret_of(config: ExecutorConfig) -> str:
    """Returns the secret of the group. Raises StartupError if any process on the network could join."""
    if config.group_secret is None and not is_local(config.leader) and not has_tls(config):
        raise StartupError(
            f"--leader {config.leader}: give all ranks the same --group-secret (PAGEWIRE_GROUP_SECRET), or "
            "certificates (--ssl-certfile, --ssl-ca-certs), so that no other process can join"
        )
    return config.group_secret or ""


def shares_memory(config: ExecutorConfig) -> bool:
    """Returns whether ranks communicate through memory rather than torch.distributed."""
    return is_local(config.leader) and resolve_device(config.device).type == "cpu"


def stage_of_rank(config: ExecutorConfig, rank: int) -> Stage:
    """Returns the stage of a rank. The leader, rank 0, is the first of the last stage, which samples."""
    count = config.pipeline_parallel_size
    return WHOLE if count == 1 else Stage(count - 1 - rank // config.tensor_parallel_size, count)


def make_memory(config: ExecutorConfig, descriptor: int | None = None) -> SharedMemory:
    """Makes the shared memory of the group, or maps that of the leader (descriptor)."""
    sizes = [config.num_ranks] * 2 + [config.tensor_parallel_size] * (2 * config.pipeline_parallel_size)
    return SharedMemory(sizes, descriptor)


def group_with_memory(config: ExecutorConfig, rank: int, memory: SharedMemory, failure: Failure, pipes: Pipes) -> Group:
    stage, place = stage_of_rank(config, rank), rank % config.tensor_parallel_size
    return Group(
        rank,
        config.num_ranks,
        world=memory.channel(_WORLD, rank),
        tensor=memory.channel(_TENSOR + stage.index, place),
        loading=memory.channel(_LOADING, rank),
        loading_tensor=memory.channel(_TENSOR + stage.count + stage.index, place),
        num_local=config.num_ranks if config.distributed_executor_backend != "external" else 1,
        failure=failure,
        stage=stage,
        pipes=pipes,
    )


def waited(config: ExecutorConfig, memory: SharedMemory, rank: int) -> float:
    """Seconds that any rank has waited for others, within steps."""
    stage = stage_of_rank(config, rank)
    channels = (memory.channel(_WORLD, rank), memory.channel(_TENSOR + stage.index, rank % config.tensor_parallel_size))
    return sum(channel.waited for channel in channels) + stats.stage_waits[stage.index]


def make_store(config: ExecutorConfig) -> dist.TCPStore:
    """The leader's end; torch.distributed's ranks find each other there."""
    return dist.TCPStore(host_of(config.leader), 0, None, is_master=True, wait_for_workers=False)


def find_store(address: str) -> dist.TCPStore:
    """A follower's end. address: host:port"""
    host, _, port = address.rpartition(":")
    return dist.TCPStore(host, int(port), None, is_master=False)


def group_with_torch(config: ExecutorConfig, rank: int, store: dist.Store, failure: Failure) -> Group:
    """Waits for all ranks. On the device thread."""
    is_cuda = resolve_device(config.device).type == "cuda"
    if is_cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("nccl" if is_cuda else "gloo", store=store, rank=rank, world_size=config.num_ranks)
    assert dist.group.WORLD is not None
    world, tensor = TorchCommunicator(dist.group.WORLD), config.tensor_parallel_size
    stages = [list(range(first, first + tensor)) for first in range(0, config.num_ranks, tensor)]
    # Every rank makes all process groups, in the same order.
    of_stages, loading_of_stages = [dist.new_group(stage) for stage in stages], [*map(dist.new_group, stages)]
    num_local = config.num_ranks if config.distributed_executor_backend != "external" else 1
    of_stage, peer_sums = of_stages[rank // tensor], None
    if is_cuda and tensor > 1 and not config.disable_custom_all_reduce:
        device = torch.device("cuda", torch.cuda.current_device())
        peer_sums = share_memory(of_stage, device, num_local == config.num_ranks)
    return Group(
        rank,
        config.num_ranks,
        world=world,
        tensor=TorchCommunicator(of_stage, peer_sums),
        loading=TorchCommunicator(dist.new_group()),  # used by a separate thread
        loading_tensor=TorchCommunicator(loading_of_stages[rank // tensor]),
        num_local=num_local,
        failure=failure,
        stage=stage_of_rank(config, rank),
        pipes=pipes_through_torch(config, rank),
    )
