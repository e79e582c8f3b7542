"""Keeps one executor on the cluster through all restarts, and lists its address."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pagewire.errors import StartupError
from pagewire.process.supervisor import STILL_WAITING_S
from pagewire.stack.ray_executors.actor import ExecutorActor, Spec, Whereabouts
from pagewire.stack.ray_executors.addresses import AddressFile

logger = logging.getLogger(__name__)

_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.2, 10.0


class Keeper:
    """Keeps one executor running.

    An executor without stages is one actor, which Ray restarts on any node, and the keeper lists its new address. An
    executor with stages has an actor for each; if one is lost, the keeper makes all of them again.
    """

    def __init__(self, specs: Sequence[Spec], demand: dict[str, float], file: AddressFile) -> None:
        """specs: those of the actors, that of the leader first. demand: the resources of each actor."""
        self._specs = specs
        self._name = specs[0].name
        self._demand = demand
        self._file = file
        self._create()

    def _create(self) -> None:
        count = len(self._specs)
        self._bundles: PlacementGroup | None = None
        options: dict[str, Any] = {"max_restarts": -1, **self._demand}
        # Executors are spread over the nodes, so that the loss of a node costs as few as possible.
        places: list[Any] = ["SPREAD"]
        if count > 1:
            # Each stage is on one node, and all stages are on the same node if it has room.
            bundle = {"CPU": self._demand["num_cpus"], "GPU": self._demand["num_gpus"]}
            self._bundles = placement_group([bundle] * count, strategy="PACK")
            options["max_restarts"] = 0
            places = [PlacementGroupSchedulingStrategy(self._bundles, index) for index in range(count)]
        self._actors: list[Any] = [
            ray.remote(ExecutorActor)
            .options(name=_name_of(spec, count), scheduling_strategy=place, **options)
            .remote(spec)
            for spec, place in zip(self._specs, places, strict=True)
        ]

    def _destroy(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        if self._bundles is not None:
            remove_placement_group(self._bundles)

    async def keep(self) -> None:
        """Runs the executor until stop(). Raises StartupError if it cannot run, and no executor has run yet."""
        backoff = _MIN_BACKOFF_S
        while True:
            began = time.monotonic()
            is_new = False
            try:
                await self._live()
                return
            except StartupError:
                if not self._file.was_used:
                    raise
                # The node may be the cause; the log of the executor has details.
                logger.warning("%s cannot start on its node; trying again", self._name)
                is_new = self._bundles is not None
            except ActorUnavailableError:
                logger.warning("%s is lost; Ray reconnects to it, or restarts it", self._name)
            except ActorDiedError as error:
                # Ray, or a user with `ray.kill`, has ended the actor for good.
                if not self._file.was_used:
                    raise StartupError(f"{self._name} cannot run on the cluster: {_cause(error)}") from error
                logger.warning("%s died (%s); making a new one", self._name, _cause(error))
                is_new = True
            finally:
                self._file.remove(self._name)
            if is_new:
                self._destroy()
            if time.monotonic() - began > _MAX_BACKOFF_S:
                backoff = _MIN_BACKOFF_S
            await asyncio.sleep(backoff)
            if is_new:
                self._create()
            backoff = min(2 * backoff, _MAX_BACKOFF_S)

    async def _live(self) -> None:
        """Runs the actors once. Raises RayActorError when they end, StartupError if the executor cannot start."""
        leader, *others = self._actors
        found = await self._find()
        logger.info("%s is at %s", self._name, found[0].address)
        meeting, share = "", 1.0
        if others:
            neighbours = Counter(one.machine for one in found)
            meeting = await leader.meeting_point.remote(len(neighbours) == 1)
            share = 1 / (max(neighbours.values()) * self._specs[0].config.tensor_parallel_size)
        running = asyncio.gather(*(actor.run.remote(meeting, share) for actor in self._actors))
        ready = asyncio.ensure_future(leader.ready.remote())
        await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            ready.result()
            self._file.put(self._name, found[0].address)
            for other in others:
                other.started.remote()
        await asyncio.wait({running})
        ready.cancel()
        running.result()

    async def _find(self) -> list[Whereabouts]:
        """Waits until all actors have a node, and returns their places."""
        finding = asyncio.gather(*(actor.whereabouts.remote() for actor in self._actors))
        while not (await asyncio.wait({finding}, timeout=STILL_WAITING_S))[0]:
            what = f"{len(self._actors)} times " if self._bundles is not None else ""
            logger.warning("%s waits for room in the Ray cluster: %s%s", self._name, what, _said(self._demand))
        return finding.result()

    async def stop(self, timeout: float) -> None:
        """Drains the executor, and ends it after `timeout` seconds."""
        stopping = asyncio.gather(*(actor.stop.remote() for actor in self._actors))
        with suppress(RayActorError, TimeoutError):
            await asyncio.wait_for(stopping, timeout)
        self._destroy()


def _name_of(spec: Spec, count: int) -> str:
    return spec.name if count == 1 else f"{spec.name}-stage-{count - 1 - spec.place}"


def _said(demand: dict[str, float]) -> str:
    return " and ".join(f"{count:g} {name.removeprefix('num_').upper()}" for name, count in demand.items() if count)


def _cause(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
