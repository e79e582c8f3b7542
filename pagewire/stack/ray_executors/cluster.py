"""The Ray cluster, and the resources that an executor needs from it."""

import logging
import math
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from pagewire.config.ray import RayExecutorsConfig
from pagewire.config.values.executor import of_cluster
from pagewire.errors import StartupError
from pagewire.process.process import usable_cores

logger = logging.getLogger(__name__)

# Pagewire does not use it; Ray requires at least 75 MiB.
_OBJECT_STORE_BYTES = 80 * 2**20
_REACHABLE_S = 5.0


def connect(config: RayExecutorsConfig) -> None:
    """Joins the cluster, or starts one on this machine. Raises StartupError."""
    given = config.ray_address or os.environ.get("RAY_ADDRESS")
    if refused := of_cluster(given):
        raise StartupError(refused)
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
        logger.info("no Ray cluster found: starting one on this machine")
        ray.init(
            "local",
            num_cpus=usable_cores(),
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            **common,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise StartupError(
            f"the Ray cluster {given or 'local'} cannot be joined: {error}. check with `ray status` that it runs; "
            "all its machines need the same versions of Ray and Python"
        ) from error


def _check_reachable(address: str) -> None:
    """Raises StartupError if nothing answers at the address. Ray itself would try for some minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACHABLE_S).close()
    except (OSError, ValueError) as error:
        raise StartupError(
            f"no Ray cluster answers at {address} ({error}): use HOST:PORT as `ray start --head` prints it, or leave "
            "--ray-address and RAY_ADDRESS out for the cluster of this machine"
        ) from error


def demand(config: RayExecutorsConfig, nodes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the resources, `num_gpus` and `num_cpus`, that Ray reserves on one node for each actor.

    An actor runs an executor, or one of its stages. nodes: as ray.nodes() returns them. On a CPU, each rank gets
    --num-threads cores; without that flag, an actor gets its share of the smallest node.
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
