"""The names of adapters: what each stands for, as operators and the directories of the executors say."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import grpc

from pagewire.services.scheduler.adapters import calls
from pagewire.services.scheduler.adapters.directory import Directory
from pagewire.services.scheduler.adapters.errors import check_name, check_path, not_found, unavailable
from pagewire.services.scheduler.adapters.failed import Failed
from pagewire.services.scheduler.adapters.loading import Loader
from pagewire.services.scheduler.adapters.registry import Registry
from pagewire.services.scheduler.adapters.tasks import Tasks
from pagewire.services.scheduler.service import convert
from pagewire.services.scheduler.service.replica_driver import ReplicaDriver
from pagewire.services.scheduler.values.executor_info import Adapter, ExecutorInfo
from pagewire.v1 import admin_pb2
from pagewire.wire.rpc import RpcError

logger = logging.getLogger(__name__)

_WATCH_S = 2.0  # between two looks at the directory
_NOT_THERE = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)


class Names:
    """Changes what names stand for, one change at a time: on all executors, or on none."""

    def __init__(
        self,
        drivers: Mapping[int, ReplicaDriver],
        registry: Registry,
        loader: Loader,
        on_change: Callable[[], None],
        check_awake: Callable[[], None],
    ) -> None:
        """drivers: of all replicas, a live view. on_change: called when a name stands for something else. check_awake:
        raises RpcError while the model sleeps."""
        self._check_awake = check_awake
        self.registry = registry
        self.changing = asyncio.Lock()
        self._drivers = drivers
        self._loader = loader
        self._on_change = on_change
        self._directory = Directory()
        self._failed = Failed()
        self._finding: dict[str, asyncio.Task[Adapter]] = {}  # by name
        self._watching: asyncio.Task[None] | None = None
        self._num_removals = 0
        self._tasks = Tasks()

    @property
    def listed(self) -> Sequence[Adapter]:
        """The adapters that requests may name, of which those that were only found have no digest yet, and those that
        cannot be served."""
        named = self.registry.listed
        if not (found := self._directory.listed):
            return named
        return sorted({one.name: one for one in (*found, *named)}.values(), key=lambda one: one.name)

    async def find(self, name: str) -> Adapter:
        """Returns what a name stands for. One in the directory is loaded. Raises RpcError NOT_FOUND, or UNAVAILABLE."""
        if (adapter := self.registry.named(name)) is not None:
            return adapter
        if not (found := self._directory.of(name)):
            raise not_found(name) if self._loader.is_served else unavailable()
        if found[0].problem:
            raise not_found(name, found[0].problem)
        if (error := self._failed.error(name)) is not None:
            raise error
        if (finding := self._finding.get(name)) is None:
            finding = self._finding[name] = self._tasks.start(self._find(Adapter(name, found[0].path)))
            finding.add_done_callback(lambda _: self._finding.pop(name))
        return await asyncio.shield(finding)

    async def _find(self, found: Adapter) -> Adapter:
        async with self.changing:
            if (adapter := self.registry.named(found.name)) is not None:
                return adapter
            try:
                adapter = await self._load_on_all(replace(found, number=self.registry.next_number))
            except RpcError as error:
                if error.code not in _NOT_THERE:
                    raise
                refused = not_found(found.name, error.message)
                self._failed.add(found.name, refused)
                raise refused from error
            self._put(adapter)
            return adapter

    async def load(
        self, request: admin_pb2.AdminServiceLoadAdapterRequest
    ) -> admin_pb2.AdminServiceLoadAdapterResponse:
        """Loads an adapter on all executors, or on none; continues if the caller disconnects. Raises RpcError."""
        if not request.path:
            adapter = await self.find(request.name)
        else:
            check_name(request.name)
            check_path(request.path)
            self._check_awake()
            adapter = await asyncio.shield(self._tasks.start(self._load(request)))
        return admin_pb2.AdminServiceLoadAdapterResponse(adapter=convert.from_adapter(adapter))

    async def _load(self, request: admin_pb2.AdminServiceLoadAdapterRequest) -> Adapter:
        async with self.changing:
            wanted = Adapter(request.name, request.path, number=self.registry.next_number)
            adapter = await self._load_on_all(wanted)
            current = self.registry.named(request.name)
            if current is not None and current.digest != adapter.digest and not request.replaces:
                await self._drop(adapter.digest, request.name)
                what = f"the adapter {request.name!r} has already been loaded with other contents; unload or replace it"
                raise RpcError(grpc.StatusCode.ALREADY_EXISTS, what)
            self._put(adapter)
            logger.info("adapter %s (%s) is loaded from %s", adapter.name, adapter.digest[:12], adapter.path)
            return adapter

    async def unload(
        self, request: admin_pb2.AdminServiceUnloadAdapterRequest
    ) -> admin_pb2.AdminServiceUnloadAdapterResponse:
        """Takes a name away; its contents go when no request needs them any longer. Raises RpcError NOT_FOUND."""
        await asyncio.shield(self._tasks.start(self._unload(request.name)))
        return admin_pb2.AdminServiceUnloadAdapterResponse()

    async def _unload(self, name: str) -> None:
        async with self.changing:
            if self.registry.named(name) is None and not self._directory.of(name):
                raise not_found(name)
            self._directory.hide(name, time.time_ns())
            await self._take_away(name)
            logger.info("adapter %s is unloaded", name)

    async def _take_away(self, name: str) -> None:
        """Takes a name away, from executors too, so that a later scheduler does not learn it from them."""
        self.registry.remove(name)
        self._on_change()
        await self._loader.forget("", name)
        self._num_removals += 1

    def _put(self, adapter: Adapter) -> None:
        self.registry.put(adapter)
        self._directory.show(adapter.name)
        self._failed.discard(adapter.name)
        self._on_change()

    async def _load_on_all(self, wanted: Adapter) -> Adapter:
        """Loads an adapter on all executors, or on none. Raises RpcError."""
        return await self._loader.load_on_all(wanted, lambda digest: self._drop(digest, wanted.name))

    async def _drop(self, digest: str, name: str) -> None:
        """Makes all executors forget contents under a name that does not stand for them."""
        current = self.registry.named(name)
        if self.registry.of_digest(digest) is None:
            await self._loader.forget(digest)
        elif current is None or current.digest != digest:
            await self._loader.forget(digest, name)

    # -- executors ---------------------------------------------------------------------------------------------------

    def on_attached(self, driver: ReplicaDriver, info: ExecutorInfo) -> bool:
        """Takes in what an executor reports. Returns whether a name stands for something else now."""
        has_changed = self.registry.note(info.adapters)
        hidden, found = self._directory.take_hidden(info.found_adapters)
        look = calls.Look(driver.replica.replica_id, info.adapter_directory, found)
        has_changed |= self._directory.note(*look, self._drivers)
        if names := {*hidden, *(one.name for one in info.adapters if self.registry.is_removed(one))}:
            self._num_removals += 1
            self._tasks.start(self._forget_names(driver, names))
        if info.adapter_directory and (self._watching is None or self._watching.done()):
            self._watching = self._tasks.start(self._watch())
        return has_changed

    async def _forget_names(self, driver: ReplicaDriver, names: Collection[str]) -> None:
        """Takes names away from an executor that was not there when they were taken away."""
        async with self.changing:
            for name in names:
                if self.registry.named(name) is None:
                    with suppress(grpc.aio.AioRpcError):  # it is told again when it is back
                        await calls.unload(driver, "", name)
            self._num_removals += 1

    async def _watch(self) -> None:
        """Follows the changes in the directory."""
        while True:
            await asyncio.sleep(_WATCH_S)
            num_removals, before, able = self._num_removals, set(self.registry.listed), self._loader.able()
            looks = [look for look in await asyncio.gather(*map(calls.look_at, able)) if look is not None]
            async with self.changing:
                if num_removals != self._num_removals:
                    continue  # they may show what was taken away meanwhile
                has_changed = [self._directory.note(*look, self._drivers) for look in looks]
                if any(has_changed):
                    self._on_change()
                for one in self._directory.listed:
                    if one.problem:  # which the directory tells until the files change
                        self._failed.discard(one.name)
                known = [one for one in self.registry.listed if one in before]
                for adapter in [one for one in known if self._directory.has_lost(one)]:
                    logger.info("adapter %s is no longer at %s", adapter.name, adapter.path)
                    await self._take_away(adapter.name)
                for adapter in list(self._directory.changed(known)):
                    if self.registry.named(adapter.name) == adapter:
                        await self._reload(adapter)

    async def _reload(self, adapter: Adapter) -> None:
        """Loads the contents that lie in the directory now."""
        if self._failed.error(adapter.name) is not None:
            return
        wanted = Adapter(adapter.name, adapter.path, base_model=adapter.base_model, number=self.registry.next_number)
        try:
            found = await self._load_on_all(wanted)
        except RpcError as error:
            self._failed.add(adapter.name, error)
            logger.warning("adapter %s is served with its earlier contents: %s", adapter.name, error.message)
            return
        if found.digest != adapter.digest:
            logger.info("adapter %s has other contents (%s) from now on", found.name, found.digest[:12])
            self._put(found)

    def stop(self) -> None:
        self._tasks.stop()
