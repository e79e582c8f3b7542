"""Loads adapters on executors, and makes executors forget them."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

import grpc

from pagewire.services.scheduler.adapters import calls
from pagewire.services.scheduler.adapters.errors import of_executor, unavailable, unserved
from pagewire.services.scheduler.adapters.registry import Registry
from pagewire.services.scheduler.adapters.slots import AdapterSlots
from pagewire.services.scheduler.service.replica_driver import ReplicaDriver
from pagewire.services.scheduler.values.executor_info import Adapter
from pagewire.wire.rpc import RpcError

logger = logging.getLogger(__name__)


class Loader:
    """The calls to executors about adapters, and what each executor has."""

    def __init__(
        self,
        drivers: Mapping[int, ReplicaDriver],
        registry: Registry,
        wake: Callable[[], None],
        gone: Callable[[Adapter, str], None],
    ) -> None:
        """drivers: of all replicas, a live view. wake: called when there may be steps to decide. gone: called when no
        executor has an adapter any longer, with the reason."""
        self._drivers = drivers
        self._registry = registry
        self._wake = wake
        self._gone = gone
        self._num_loading = Counter[str]()  # by digest: executors that load it

    def able(self) -> list[ReplicaDriver]:
        """Returns the drivers of the executors with slots."""
        return [one for one in self._drivers.values() if one.has_executor and slots_of(one).num_slots]

    @property
    def is_served(self) -> bool:
        """True if there is an executor, perhaps one without slots."""
        return any(driver.has_executor for driver in self._drivers.values())

    async def try_at(self, driver: ReplicaDriver, adapter: Adapter) -> grpc.aio.AioRpcError | None:
        """Loads an adapter on one executor; returns the error if that fails."""
        slots, digest = slots_of(driver), adapter.digest
        self._num_loading[digest] += 1
        try:
            await calls.load(driver, adapter)
        except grpc.aio.AioRpcError as error:
            slots.on_lacking(digest)
            is_had = self._num_loading[digest] > 1 or any(slots_of(one).has_loaded(digest) for one in self.able())
            if error.code() is not grpc.StatusCode.UNAVAILABLE and not is_had:
                self._gone(adapter, error.details() or error.code().name)
            return error
        finally:
            self._num_loading[digest] -= 1
            if not self._num_loading[digest]:
                del self._num_loading[digest]
        slots.on_loaded(digest)
        self._wake()
        if self._registry.is_removed(adapter):  # its name was taken away meanwhile
            with suppress(grpc.aio.AioRpcError):
                await calls.unload(driver, "", adapter.name)
        return None

    async def give(self, driver: ReplicaDriver, adapters: Sequence[Adapter]) -> None:
        """Loads adapters on an executor that lacks them."""
        for adapter in adapters:
            if (error := await self.try_at(driver, adapter)) is None:
                continue
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                return  # it is given them when it is back
            what = "the executor at %s lacks adapter %s, so requests with it run elsewhere: %s"
            logger.warning(what, driver.address, adapter.label, error.details())

    async def load_on_all(self, wanted: Adapter, drop: Callable[[str], Awaitable[None]]) -> Adapter:
        """Loads an adapter on all executors. Raises RpcError, once contents that some have loaded were handed to
        `drop`."""
        if not (able := self.able()):
            raise unserved() if self.is_served else unavailable()
        of_each = [slots_of(driver) for driver in able]
        answers = await asyncio.gather(*(calls.load(one, wanted) for one in able), return_exceptions=True)
        loaded = {answer.digest: answer for answer in answers if isinstance(answer, Adapter)}
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if not errors and len(loaded) == 1:
            for slots in of_each:
                slots.on_loaded(next(iter(loaded)))
            return next(iter(loaded.values()))
        for digest in loaded:
            await drop(digest)
        if errors:
            raise of_executor(errors[0]) if isinstance(errors[0], grpc.aio.AioRpcError) else errors[0]
        what = f"executors found different contents at {wanted.path}; give all of them the same files"
        raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, what, [("path", what)])

    async def forget(self, digest: str, name: str = "") -> None:
        """Makes all executors forget contents. name: only under this name, as others stand for them; digest: empty:
        only the name."""
        able = self.able()
        for driver in () if name else able:
            slots_of(driver).forget(digest)
        await asyncio.gather(*(calls.unload(driver, digest, name) for driver in able), return_exceptions=True)


def slots_of(driver: ReplicaDriver) -> AdapterSlots:
    """Returns the slots of a replica."""
    slots = driver.replica.slots
    assert isinstance(slots, AdapterSlots)
    return slots
