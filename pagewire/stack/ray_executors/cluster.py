"""The Ray cluster, and what an executor asks of it."""

import logging
import math
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from pagewire.config.ray import RayExecutorsConfig
from pagewire.errors import StartupError
from pagewire.process.process import usable_cores

logger = logging.getLogger(__name__)

# Nothing of ours goes through it; Ray wants at least 75 MiB.
_OBJECT_STORE_BYTES = 80 * 2**20
_REACHABLE_S = 5.0


def connect(config: RayExecutorsConfig) -> None:
    """Joins the cluster, or starts one of this machine. Raises StartupError."""
    given = config.ray_address or os.environ.get("RAY_ADDRESS")
    if given and given.startswith("ray://"):
        raise StartupError(
            f"--ray-address {given}: executors are reached directly, not by a Ray client: serve on a machine of the "
            "cluster (`ray start --address`), and give HOST:PORT of its head"
        )
    if given and given not in ("local", "auto"):
        _check_reachable(given)
    common: dict[str, Any] = {"configure_logging": False, "log_to_driver": True}
    try:
        if given != "local":
            try:
                ray.init(given or "auto", **common)
                return
            except ConnectionError:
                if given:
                    raise
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        logger.info("no Ray cluster here: starting one of this machine")
        ray.init(
            "local",
            num_cpus=usable_cores(),
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            **common,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise StartupError(
            f"the Ray cluster {given or 'local'} cannot be joined: {error}. `ray status` says whether it runs; all of "
            "its machines need the same versions of Ray and Python"
        ) from error


def _check_reachable(address: str) -> None:
    """Ray itself would try for some minutes. Raises StartupError."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACHABLE_S).close()
    except (OSError, ValueError) as error:
        raise StartupError(
            f"no Ray cluster answers at {address} ({error}): give HOST:PORT as `ray start --head` prints it, or leave "
            "--ray-address and RAY_ADDRESS out for the one that this machine is part of"
        ) from error


def demand(config: RayExecutorsConfig, nodes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What Ray keeps for each actor, which has an executor or, where that has stages, one of them, all of it on one
    node: `num_gpus`, `num_cpus`.

    nodes: as ray.nodes() has them. On a CPU, each rank has as many cores as --num-threads says, else an actor its share
    of the smallest node's.
    """
    resources = [node["Resources"] for node in nodes if node["Alive"]]
    ranks = config.tensor_parallel_size
    if config.device == "cuda" or (config.device == "auto" and any(one.get("GPU") for one in resources)):
        return {"num_gpus": ranks, "num_cpus": ranks}
    cores = [int(one["CPU"]) for one in resources if one.get("CPU", 0) >= 1]
    actors = config.data_parallel_size * config.pipeline_parallel_size
    share = min(cores, default=1) // math.ceil(actors / max(1, len(cores)))
    each = config.num_threads or max(1, share // ranks)
    return {"num_gpus": 0, "num_cpus": each * ranks}
