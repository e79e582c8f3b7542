"""The process that keeps executors on a Ray cluster."""

import asyncio
import os
import secrets
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import ray

from pagewire.config import ExecutorConfig
from pagewire.config.ray import RayExecutorsConfig
from pagewire.process.supervisor import STOP_MARGIN_S
from pagewire.stack.ray_executors import cluster
from pagewire.stack.ray_executors.actor import Spec
from pagewire.stack.ray_executors.addresses import AddressFile
from pagewire.stack.ray_executors.keeper import Keeper
from pagewire.wire import rpc

# Variables of this process that executors need, and that are not flags.
_FORWARDED = ("HF_TOKEN", "HF_ENDPOINT")


async def serve(config: RayExecutorsConfig, command: tuple[str, ...] = ()) -> None:
    """Keeps the executors running until a signal. They end with this process, because actors die with their driver.

    command: see `Spec`. Raises StartupError if there is no cluster, or no executor can start on it.
    """
    file = AddressFile(Path(config.address_file))
    await asyncio.to_thread(cluster.connect, config)
    try:
        await _keep([Keeper(specs, demand, file) for specs, demand in plan(config, command)], config)
    finally:
        await asyncio.to_thread(ray.shutdown)


def plan(config: RayExecutorsConfig, command: tuple[str, ...] = ()) -> list[tuple[list[Spec], dict[str, float]]]:
    """Returns the specs of the actors of each executor, and the resources of each actor."""
    demand = cluster.demand(config, ray.nodes())
    executor = ExecutorConfig(**{one.name: getattr(config, one.name) for one in fields(ExecutorConfig)})
    if not demand["num_gpus"]:
        executor = replace(executor, num_threads=int(demand["num_cpus"]) // config.tensor_parallel_size)
    count, stages = config.data_parallel_size, config.pipeline_parallel_size
    executor = replace(
        executor,
        metrics_port=None,
        cpu_share=1 / count,
        distributed_executor_backend="mp"
        if stages == 1
        else "external",  # ranks are started by the leader, or by actors
    )
    common: dict[str, Any] = {
        "node": ray.get_runtime_context().get_node_id(),
        "user": os.geteuid(),
        "command": command,
        "environment": {name: os.environ[name] for name in _FORWARDED if name in os.environ},
    }

    def specs(name: str) -> list[Spec]:
        own = replace(executor, group_secret=None if stages == 1 else secrets.token_hex(32))
        return [Spec(name=name, place=place, config=own, **common) for place in range(stages)]

    names = ["executor"] if count == 1 else [f"executor-{number}" for number in range(count)]
    return [(specs(name), demand) for name in names]


async def _keep(keepers: list[Keeper], config: RayExecutorsConfig) -> None:
    stopping = asyncio.create_task(rpc.wait_for_signal())
    keeping = [asyncio.create_task(keeper.keep()) for keeper in keepers]
    try:
        done, _ = await asyncio.wait([stopping, *keeping], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        drains = stopping.done() and not stopping.cancelled() and stopping.result()
        await rpc.cancel([stopping])
        timeout = STOP_MARGIN_S + (config.shutdown_timeout if drains else 0.0)
        await asyncio.gather(*(keeper.stop(timeout) for keeper in keepers))
        await asyncio.wait(keeping, timeout=STOP_MARGIN_S)
