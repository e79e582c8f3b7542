"""The set of executors, which changes as they join and leave: each listed executor has a replica and a driver.

An executor that has left the list drains: it gets no new requests, unless there is no other, and is removed when no
request runs on it or its stream breaks; its requests then continue elsewhere.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import grpc

from pagewire.services.scheduler.core.replica import Replica
from pagewire.services.scheduler.core.scheduler import Scheduler
from pagewire.services.scheduler.service.replica_driver import ReplicaDriver
from pagewire.wire.discovery.listed import Discovery, Listed
from pagewire.wire.rpc import RpcError

logger = logging.getLogger(__name__)

Connect = Callable[[Listed], grpc.aio.Channel]
MakeDriver = Callable[[Replica, str, grpc.aio.Channel], ReplicaDriver]


class ListListener(Protocol):
    """Receives the changes of the list, one at a time."""

    def on_listed(self) -> None:
        """Takes in that the list changed."""

    def on_left(self, replica: Replica) -> None:
        """Detaches a replica that is about to be removed, as no request runs on it."""

    def on_removed(self, replica: Replica) -> None:
        """Takes in that a replica is removed right after this call."""


def _is_starting(driver: ReplicaDriver) -> bool:
    is_connected = driver.channel.get_state() is grpc.ChannelConnectivity.READY
    return is_connected and not driver.has_executor and not driver.client.was_refused


class Executors:
    """The drivers of all replicas: `drivers` has them by replica id and changes in place."""

    def __init__(
        self, scheduler: Scheduler, connect: Connect, make_driver: MakeDriver, listener: "ListListener"
    ) -> None:
        """make_driver: makes the driver of a replica from the address and channel of its executor."""
        self._scheduler = scheduler
        self._connect = connect
        self._make_driver = make_driver
        self._listener = listener
        self.drivers: dict[int, ReplicaDriver] = {}
        self._listed: dict[Listed, ReplicaDriver] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()  # set when a driver may have to start or be removed

    def follow(self, listed: Sequence[Listed]) -> None:
        """Takes in the current list."""
        present = set(listed)
        for one, driver in self._listed.items():
            if driver.is_unlisted == (one in present):
                driver.set_listed(one in present)
                logger.info("the executor at %s has %s the list", one.address, "rejoined" if one in present else "left")
        for one in dict.fromkeys(listed):
            if one not in self._listed:
                self._add(one)
        self._changed.set()
        self._listener.on_listed()

    def starting(self) -> list[str]:
        """Returns the addresses of executors that accept connections, but have not become ready."""
        return [driver.address for driver in self.drivers.values() if _is_starting(driver)]

    def on_progress(self) -> None:
        """Takes in that a request may have ended, or an executor left."""
        if any(driver.is_unlisted for driver in self.drivers.values()):
            self._changed.set()

    def check_unused(self, replica: Replica, incarnation: int) -> None:
        """Raises RpcError FAILED_PRECONDITION if another replica has this executor because it is listed twice."""
        for driver in self.drivers.values():
            if driver.replica is not replica and driver.client.incarnation == incarnation:
                raise RpcError(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"it is already used at {driver.address}; list each executor once",
                )

    async def run(self, discovery: Discovery) -> None:
        """Follows the list and runs the drivers until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow_all(discovery), name="discovery")
                while True:
                    await self._changed.wait()
                    self._changed.clear()
                    for number in self.drivers.keys() - self._tasks.keys():
                        self._tasks[number] = tasks.create_task(self.drivers[number].run(), name=f"replica {number}")
                    while (finished := next(filter(_is_over, self.drivers.values()), None)) is not None:
                        await self._remove(finished)
        finally:
            for driver in self.drivers.values():
                await driver.channel.close()

    async def _follow_all(self, discovery: Discovery) -> None:
        async for listed in discovery.lists():
            self.follow(listed)

    def _add(self, one: Listed) -> None:
        replica = self._scheduler.add_replica()
        driver = self._make_driver(replica, one.address, self._connect(one))
        self.drivers[replica.replica_id] = self._listed[one] = driver

    async def _remove(self, driver: ReplicaDriver) -> None:
        replica = driver.replica
        # An executor that is listed again meanwhile gets another replica.
        self._listed = {one: other for one, other in self._listed.items() if other is not driver}
        task = self._tasks.pop(replica.replica_id)
        task.cancel()
        await asyncio.wait([task])
        if replica.info is not None:
            self._listener.on_left(replica)
        self._listener.on_removed(replica)
        self._scheduler.remove_replica(replica)
        del self.drivers[replica.replica_id]
        await driver.channel.close()


def _is_over(driver: ReplicaDriver) -> bool:
    return driver.is_unlisted and (not driver.has_executor or driver.replica.is_drained)
