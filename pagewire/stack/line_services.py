"""The services of a line: a tokenizer service, a scheduler and executors, and how they find each other."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pagewire.config import RayExecutorsConfig, SchedulerConfig, ServeConfig, ServiceConfig, TokenizerConfig
from pagewire.config.profiles import runs_on_cuda
from pagewire.process import binding, cpu_sets, local_executors
from pagewire.process.socket_directory import socket_names
from pagewire.process.supervisor import Service
from pagewire.stack import launch
from pagewire.wire.addresses import endpoint
from pagewire.wire.discovery.file import has_addresses

logger = logging.getLogger(__name__)

_FULL_NAMES = {
    "tokenizer": "pagewire.v1.InferenceService",
    "scheduler": "pagewire.v1.SchedulerService",
    "executor": "pagewire.v1.ExecutorService",
}
# The file of addresses of executors on a Ray cluster, in the directory of the sockets.
_ADDRESSES = "executors.txt"


def names_of(config: ServeConfig) -> list[str]:
    """Returns the names of the processes with a socket on this machine."""
    return socket_names(local_executors.names(config))


def address_of(directory: Path, service: str) -> str:
    """Returns the address of a service in the directory of its line."""
    return f"unix:{directory}/{service}.sock"


def beside(config: ServeConfig) -> dict[str, Any]:
    """Returns the flags of services that share the machine with the executors of this configuration."""
    places = _places(config)
    return {"cpu_bind": None if places is None else places.others.flags["cpu_bind"]}


def line_services(
    config: ServeConfig,
    directory: Path,
    given: ServeConfig | None = None,
    *,
    has_grpc: bool = True,
    share: float = 1.0,
    label: str = "",
) -> list[Service]:
    """Returns the processes of a line, in the order in which they are stopped.

    Args:
        given: the configuration before it was resolved, for other machines, which have their own files.
        has_grpc: whether the tokenizer service has a public port.
        share: of memory that all lines use.
        label: distinguishes the processes from those of other lines.
    """
    on_ray = config.distributed_executor_backend == "ray"
    executors = local_executors.names(config)
    address = {name: address_of(directory, name) for name in names_of(config)}
    places = _places(config)
    others = beside(config)
    tokenizer = config.part(
        TokenizerConfig,
        listen=address["tokenizer"],
        public_listen=endpoint(config.host, config.grpc_port) if has_grpc else "",
        public_admin=config.admin_port is None,
        scheduler_address=address["scheduler"],
        metrics_port=None,
        **others,
    )
    tokens = "" if config.scheduler_grpc_port is None else endpoint(config.host, config.scheduler_grpc_port)
    scheduler = config.part(
        SchedulerConfig,
        listen=address["scheduler"],
        public_listen=tokens,
        executor_discovery="file" if on_ray else "static",
        executor_address=str(directory / _ADDRESSES) if on_ray else ",".join(address[name] for name in executors),
        metrics_port=None,
        **others,
    )

    def grpc_service(kind: str, part: ServiceConfig, name: str = "", **environment: str) -> Service:
        ready = partial(launch.grpc_ready, address[name or kind], _FULL_NAMES[kind])
        service = launch.service(kind, part, ready, name=f"{name or kind}{label}")
        return replace(service, environment={**service.environment, **environment})

    return [
        grpc_service("tokenizer", tokenizer),
        grpc_service("scheduler", scheduler),
        *_ray_executors(config, directory, given or config),
        *(
            grpc_service("executor", _executor(config, share, address[name], place, role), name, **devices)
            for name, devices, place, role in zip(
                executors,
                local_executors.devices(config),
                _logged(places, len(executors), label),
                local_executors.roles(config),
                strict=True,
            )
        ),
    ]


def _executor(config: ServeConfig, share: float, *where: Any) -> ServiceConfig:
    """Returns the configuration of an executor. share: of the memory that follows from no flag."""
    part = local_executors.part(config, *where)
    if share == 1.0:
        return part
    if not runs_on_cuda(config.device):
        return replace(part, memory_share=share)
    is_given = config.gpu_memory_utilization != ServeConfig.gpu_memory_utilization
    return part if is_given else replace(part, gpu_memory_utilization=config.gpu_memory_utilization * share)


def _places(config: ServeConfig) -> binding.CpuBindings | None:
    executors = local_executors.names(config)
    return binding.places(config, len(executors), cpu_sets.usable_cpus(), binding.nodes()) if executors else None


def _logged(places: binding.CpuBindings | None, count: int, label: str) -> Sequence[binding.CpuBinding | None]:
    """Returns the place of each executor, and logs the places. label: of the line."""
    if places is None:
        return [None] * count
    for name, place in (*((f"executor {i}", p) for i, p in enumerate(places.executors)), ("others", places.others)):
        node = "" if place.node is None else f" of NUMA node {place.node}"
        logger.info("%s%s: processors %s%s", name, label, cpu_sets.cpu_text(place.cpus) or "not bound", node)
    return places.executors


def _ray_executors(config: ServeConfig, directory: Path, given: ServeConfig) -> list[Service]:
    """Returns the process that keeps executors on a Ray cluster, if they run there; it is ready once one of them is."""
    if config.distributed_executor_backend != "ray":
        return []
    addresses = directory / _ADDRESSES
    if not Path(given.model).expanduser().exists():  # a hub id, which each node resolves itself
        config = replace(config, model=given.model, revision=given.revision)
    part = config.part(
        RayExecutorsConfig, address_file=str(addresses), metrics_port=None, distributed_executor_backend="mp"
    )

    async def ready() -> bool:
        return has_addresses(addresses)

    return [launch.service("ray-executors", part, ready)]
