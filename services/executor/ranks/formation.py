"""How ranks are joined: what they must have in common, and the communicators between them."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

from pagewire.config import ExecutorConfig
from pagewire.errors import StartupError
from pagewire.services.executor.parallel.group import Failure, Group
from pagewire.services.executor.parallel.shared_memory import SharedMemory
from pagewire.services.executor.parallel.torch_distributed import TorchCommunicator
from pagewire.services.executor.ranks.link import host_of, is_local
from pagewire.services.executor.startup import resolve_device

# What each rank may have its own of. Of the model it is the weights that are compared, once they are read.
_OWN_FLAGS = frozenset(
    {
        *("rank", "leader", "group_secret", "distributed_executor_backend", "listen", "metrics_port", "admin_host"),
        *("log_level", "log_format", "otlp_traces_endpoint", "shutdown_timeout", "hang_timeout"),
        *("ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"),
        *("model", "revision", "download_dir", "weights_cache", "num_threads", "cpu_share"),
    }
)
_WORLD, _TENSOR, _LOADING = range(3)  # channels in shared memory


def common_flags(config: ExecutorConfig) -> dict[str, str]:
    """Those that all ranks must have the same, as --name."""
    return {
        "--" + field.name.replace("_", "-"): str(getattr(config, field.name))
        for field in dataclasses.fields(ExecutorConfig)
        if field.name not in _OWN_FLAGS
    }


def secret_of(config: ExecutorConfig) -> str:
    """Raises StartupError if anybody on the network could join."""
    if config.group_secret is None and not is_local(config.leader):
        raise StartupError(
            f"--leader {config.leader}: give all ranks the same --group-secret (PAGEWIRE_GROUP_SECRET), so that nobody "
            "else can join"
        )
    return config.group_secret or ""


def shares_memory(config: ExecutorConfig) -> bool:
    """Whether ranks compute together through memory; else through torch.distributed."""
    return is_local(config.leader) and resolve_device(config.device).type == "cpu"


def make_memory(config: ExecutorConfig, descriptor: int | None = None) -> SharedMemory:
    """descriptor: of what the leader has made."""
    return SharedMemory([config.num_ranks] * 3, descriptor)


def group_with_memory(config: ExecutorConfig, rank: int, memory: SharedMemory, failure: Failure) -> Group:
    return Group(
        rank,
        config.num_ranks,
        world=memory.channel(_WORLD, rank),
        tensor=memory.channel(_TENSOR, rank),
        loading=memory.channel(_LOADING, rank),
        num_local=config.num_ranks if config.distributed_executor_backend != "external" else 1,
        failure=failure,
    )


def make_store(config: ExecutorConfig) -> dist.TCPStore:
    """The leader's, where the ranks of torch.distributed find each other."""
    return dist.TCPStore(host_of(config.leader), 0, None, is_master=True, wait_for_workers=False)


def find_store(address: str) -> dist.TCPStore:
    """A follower's. address: host:port"""
    host, _, port = address.rpartition(":")
    return dist.TCPStore(host, int(port), None, is_master=False)


def group_with_torch(config: ExecutorConfig, rank: int, store: dist.Store, failure: Failure) -> Group:
    """Waits for all ranks. On the device thread."""
    is_cuda = resolve_device(config.device).type == "cuda"
    if is_cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("nccl" if is_cuda else "gloo", store=store, rank=rank, world_size=config.num_ranks)
    assert dist.group.WORLD is not None
    world = TorchCommunicator(dist.group.WORLD)
    return Group(
        rank,
        config.num_ranks,
        world=world,
        tensor=world,
        loading=TorchCommunicator(dist.new_group()),  # of a thread of its own
        num_local=config.num_ranks if config.distributed_executor_backend != "external" else 1,
        failure=failure,
    )
