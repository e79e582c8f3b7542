"""Keeps one executor on the cluster, through all its lives, and says where it is."""

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError

from pagewire.errors import StartupError
from pagewire.ray_executors.actor import ExecutorActor, Spec
from pagewire.ray_executors.addresses import AddressFile
from pagewire.supervisor import STILL_WAITING_S

logger = logging.getLogger(__name__)

_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.2, 10.0


class Keeper:
    """One executor. Ray starts its actor again, here or on another node; what is left to do is to notice where."""

    def __init__(self, spec: Spec, demand: dict[str, float], file: AddressFile) -> None:
        self._spec = spec
        self._demand = demand
        self._file = file
        self._actor = self._create()

    def _create(self) -> Any:
        options: dict[str, Any] = {
            "name": self._spec.name,
            "max_restarts": -1,
            # The executors of one stack are on as many nodes as there are: what one node can do to them is then least.
            "scheduling_strategy": "SPREAD",
            **self._demand,
        }
        return ray.remote(ExecutorActor).options(**options).remote(self._spec)

    async def keep(self) -> None:
        """Until stop(). Raises StartupError if the executor cannot run, and none has yet."""
        backoff = _MIN_BACKOFF_S
        while True:
            began = time.monotonic()
            try:
                await self._live()
                return
            except StartupError:
                if not self._file.was_used:
                    raise
                # The node may be to blame, as others could; the executor has told there why.
                logger.warning("%s cannot start where it is: trying again", self._spec.name)
            except ActorUnavailableError:
                logger.warning("%s is lost: Ray looks for it, or starts it again", self._spec.name)
            except ActorDiedError as error:
                # For good: nobody but Ray itself, or somebody with `ray.kill`, does that.
                if not self._file.was_used:
                    raise StartupError(f"{self._spec.name} cannot be run on the cluster: {_cause(error)}") from error
                logger.warning("%s is dead (%s): making another", self._spec.name, _cause(error))
                self._actor = self._create()
            finally:
                self._file.remove(self._spec.name)
            if time.monotonic() - began > _MAX_BACKOFF_S:
                backoff = _MIN_BACKOFF_S
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _MAX_BACKOFF_S)

    async def _live(self) -> None:
        """One life of the actor. Raises RayActorError at its end, StartupError if its executor cannot start."""
        finding = asyncio.ensure_future(self._actor.address.remote())
        while not (await asyncio.wait({finding}, timeout=STILL_WAITING_S))[0]:
            logger.warning("%s waits for a node of the Ray cluster with %s", self._spec.name, _said(self._demand))
        address = finding.result()
        logger.info("%s is at %s", self._spec.name, address)
        running = asyncio.ensure_future(self._actor.run.remote())
        ready = asyncio.ensure_future(self._actor.ready.remote())
        await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            ready.result()
            self._file.put(self._spec.name, address)
        await asyncio.wait({running})
        ready.cancel()
        running.result()

    async def stop(self, timeout: float) -> None:
        """Has it drain, and ends it after `timeout` seconds."""
        with suppress(RayActorError, TimeoutError):
            await asyncio.wait_for(asyncio.ensure_future(self._actor.stop.remote()), timeout)
        ray.kill(self._actor)


def _said(demand: dict[str, float]) -> str:
    return " and ".join(f"{count:g} {name.removeprefix('num_').upper()}" for name, count in demand.items() if count)


def _cause(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
