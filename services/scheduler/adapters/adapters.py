"""The adapters of the service: which there are, on which executors they are loaded, and the requests that need them.

A request is pinned to the contents (the digest) that its adapter's name stands for when it arrives. Before it waits for
a step, an executor has read the adapter: steps wait for a disk only if requests wait for more than `--max-cpu-loras`.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

import grpc

from pagewire.services.scheduler.adapters.errors import gone, not_found, of_executor, unavailable, unserved
from pagewire.services.scheduler.adapters.metrics import METRICS
from pagewire.services.scheduler.adapters.names import Missing, check_name, is_name
from pagewire.services.scheduler.adapters.registry import Registry
from pagewire.services.scheduler.adapters.slots import AdapterSlots
from pagewire.services.scheduler.service import convert
from pagewire.services.scheduler.service.replica_driver import ReplicaDriver
from pagewire.services.scheduler.values.executor_info import Adapter
from pagewire.services.scheduler.values.request import Request
from pagewire.v1 import admin_pb2
from pagewire.v1.scheduler_link_pb2 import TokenSubmission
from pagewire.wire.rpc import RpcError

logger = logging.getLogger(__name__)

# Seconds in which tokenizer services resubmit requests after a restart, and executors connect, which know the adapters.
_RESUBMITTED_S = 5.0
# Seconds without a live request after which executors forget an adapter without a name. Requests of a tokenizer service
# that restarts are not live for a moment.
_UNUSED_S = 2 * _RESUBMITTED_S
_LOOK_S = 1.0
_RETRY_S = 0.1
_NOT_THERE = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)
# Executors that may be lost while they load an adapter for a request.
_MAX_LOSSES = 3


class Adapters:
    """Loads adapters on executors, and makes requests wait until theirs is loaded."""

    def __init__(
        self,
        drivers: Mapping[int, ReplicaDriver],
        wake: Callable[[], None],
        changed: Callable[[], None],
        end: Callable[[Request, RpcError], None],
    ) -> None:
        """drivers: of all replicas, a live view. wake: called when there may be steps to decide. changed: called when
        a name stands for something else. end: ends a request with an error."""
        self.registry = Registry()
        self._drivers = drivers
        self._wake = wake
        self._changed = changed
        self._missing = Missing()
        self._end = end
        self._num_loading = Counter[str]()  # by digest: executors that load it
        self._of_requests = WeakValueDictionary[int, Request]()  # with adapters, by id
        self._unused_since: dict[str, float] = {}  # retired digest -> time.monotonic()
        self._learns_until = time.monotonic() + _RESUBMITTED_S
        self._attached = asyncio.Event()  # set and replaced when an executor has connected
        self._changing = asyncio.Lock()  # one change at a time
        self._finding: dict[str, asyncio.Task[Adapter]] = {}  # by name
        self._tasks = set[asyncio.Task[None]]()
        self._sweeping: asyncio.Task[None] | None = None
        METRICS.source = self

    @property
    def listed(self) -> Sequence[Adapter]:
        """The adapters that requests may name."""
        return self.registry.listed

    @property
    def num_slots(self) -> int:
        """The number of slots of the executor that has most."""
        return max((_slots_of(driver).num_slots for driver in self._drivers.values()), default=0)

    @property
    def running_names(self) -> Collection[str]:
        """The adapters of running requests."""
        drivers = tuple(self._drivers.values())
        return self._names({digest for driver in drivers for digest in _slots_of(driver).digests})

    @property
    def waiting_names(self) -> Collection[str]:
        """The adapters of waiting requests."""
        return self._names({one.adapter_digest for one in self._live() if one.replica_id is None})

    def _live(self) -> list[Request]:
        """Returns the requests with adapters that have not ended. May be called on any thread."""
        found = (reference() for reference in self._of_requests.valuerefs())
        return [request for request in found if request is not None and not request.is_finished]

    def _names(self, digests: Iterable[str]) -> set[str]:
        return {adapter.name for digest in digests if (adapter := self.registry.of_digest(digest)) is not None}

    # -- requests ----------------------------------------------------------------------------------------------------

    def pin(self, submission: TokenSubmission) -> str:
        """Returns the digest of the adapter of a request that arrives; empty: it names none. Raises RpcError
        NOT_FOUND."""
        name, digest = submission.request.adapter, submission.adapter_digest
        if not name or digest:
            return digest
        if (adapter := self.registry.named(name)) is None:
            raise not_found(name)
        return adapter.digest

    async def prepare(self, request: Request) -> None:
        """Returns when an executor can compute the request. Raises RpcError FAILED_PRECONDITION if the adapter is not
        available any longer."""
        self._of_requests[request.request_id] = request
        adapter, num_losses = await self._of_digest(request.adapter_digest), 0
        METRICS.on_request(adapter.name)
        while num_losses < _MAX_LOSSES:
            pending = {self._in_background(self._try_at(driver, adapter)) for driver in self._able()}
            num_losses += bool(pending)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                errors = [task.result() for task in done if not task.cancelled()]
                if None in errors:
                    return
                for error in filter(None, errors):
                    if error.code() is not grpc.StatusCode.UNAVAILABLE and not pending:
                        raise gone(f"adapter {adapter.name} cannot be used any longer: {error.details()}")
            await asyncio.sleep(_RETRY_S)
            adapter = await self._of_digest(request.adapter_digest)
        what = f"the executor was lost {_MAX_LOSSES} times in a row while it loaded the request's adapter; see its log"
        raise RpcError(grpc.StatusCode.INTERNAL, what)

    async def _of_digest(self, digest: str) -> Adapter:
        """Returns the adapter with these contents. After a start, it waits for executors that may have it."""
        while (adapter := self.registry.of_digest(digest)) is None or not self._able():
            left = self._learns_until - time.monotonic()
            if left <= 0 and self._is_served:
                if adapter is None:
                    raise gone("the adapter of this request is not available any longer; send the request again")
                raise unserved()
            attached = self._attached
            with suppress(TimeoutError):
                await asyncio.wait_for(attached.wait(), left if left > 0 else None)
        return adapter

    # -- names -------------------------------------------------------------------------------------------------------

    async def find(self, name: str) -> Adapter:
        """Returns what a name stands for. An unknown one is looked for in the directory of the executors, and loaded.
        Raises RpcError NOT_FOUND, or UNAVAILABLE."""
        if (adapter := self.registry.named(name)) is not None:
            return adapter
        if not is_name(name) or name in self._missing:
            raise not_found(name)
        if (finding := self._finding.get(name)) is None:
            finding = self._finding[name] = asyncio.create_task(self._find(name), name="find adapter")
            finding.add_done_callback(lambda _: self._finding.pop(name))
        return await asyncio.shield(finding)

    async def _find(self, name: str) -> Adapter:
        if not (able := self._able()):
            raise not_found(name) if self._is_served else unavailable()
        try:
            found = await able[0].client.load_adapter(Adapter(name, number=self.registry.next_number))
        except grpc.aio.AioRpcError as error:
            if error.code() in _NOT_THERE:  # there may be no directory, or an adapter that does not fit
                self._missing.add(name)
                raise not_found(name, error.details() or "") from error
            raise of_executor(error) from error
        async with self._changing:
            if (adapter := self.registry.named(name)) is not None:
                await self._drop(found.digest, name)
                return adapter
            found = await self._load_on_all(found)
            self._put(found)
            return found

    async def load(
        self, request: admin_pb2.AdminServiceLoadAdapterRequest
    ) -> admin_pb2.AdminServiceLoadAdapterResponse:
        """Loads an adapter on all executors, or on none; continues if the caller disconnects. Raises RpcError."""
        if not request.path:
            adapter = await self.find(request.name)
        else:
            check_name(request.name)
            adapter = await asyncio.shield(asyncio.create_task(self._load(request), name="load adapter"))
        return admin_pb2.AdminServiceLoadAdapterResponse(adapter=convert.from_adapter(adapter))

    async def _load(self, request: admin_pb2.AdminServiceLoadAdapterRequest) -> Adapter:
        async with self._changing:
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
        async with self._changing:
            if (adapter := self.registry.remove(request.name)) is None:
                raise not_found(request.name)
            logger.info("adapter %s (%s) is unloaded", adapter.name, adapter.digest[:12])
            self._on_change()
            if adapter.digest not in self.registry.retired:
                await self._forget(adapter.digest, adapter.name)  # the contents have another name
        return admin_pb2.AdminServiceUnloadAdapterResponse()

    def _put(self, adapter: Adapter) -> None:
        self.registry.put(adapter)
        self._missing.discard(adapter.name)
        self._on_change()

    def _on_change(self) -> None:
        self._changed()
        if self._sweeping is None and self.registry.retired:
            self._sweeping = asyncio.create_task(self._sweep(), name="unload adapters")

    # -- executors ---------------------------------------------------------------------------------------------------

    def on_attached(self, driver: ReplicaDriver) -> None:
        """Takes in what an executor reports, and gives it what it lacks; requests with these adapters go there when it
        has them."""
        info = driver.replica.info
        assert info is not None
        if self.registry.note(info.adapters) or self.registry.retired:
            self._on_change()
        attached, self._attached = self._attached, asyncio.Event()
        attached.set()
        unneeded = self.registry.retired - {request.adapter_digest for request in self._live()}
        for other in self._able():
            has_loaded = _slots_of(other).has_loaded
            lacking = [one for one in self.registry.known if not has_loaded(one.digest) and one.digest not in unneeded]
            if lacking and (other is driver or info.adapters):
                self._in_background(self._give(other, lacking))

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name="load adapters")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _give(self, driver: ReplicaDriver, adapters: Sequence[Adapter]) -> None:
        """Loads adapters on an executor that lacks them."""
        for adapter in adapters:
            if (error := await self._try_at(driver, adapter)) is None:
                continue
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                return  # it is given them when it is back
            what = "the executor at %s lacks adapter %s, so requests with it run elsewhere: %s"
            logger.warning(what, driver.address, adapter.name, error.details())

    async def _try_at(self, driver: ReplicaDriver, adapter: Adapter) -> grpc.aio.AioRpcError | None:
        """Loads an adapter on one executor; returns the error if that fails. If no executor has it any longer, requests
        that wait for it end."""
        slots, digest = _slots_of(driver), adapter.digest
        self._num_loading[digest] += 1
        try:
            await driver.client.load_adapter(adapter)
        except grpc.aio.AioRpcError as error:
            slots.on_lacking(digest)
            is_had = self._num_loading[digest] > 1 or any(_slots_of(one).has_loaded(digest) for one in self._able())
            if error.code() is not grpc.StatusCode.UNAVAILABLE and not is_had:
                for request in [one for one in self._live() if one.adapter_digest == digest and one.replica_id is None]:
                    self._end(request, gone(f"adapter {adapter.name} cannot be used any longer: {error.details()}"))
            return error
        finally:
            self._num_loading[digest] -= 1
        slots.on_loaded(digest)
        self._wake()
        return None

    async def _load_on_all(self, wanted: Adapter) -> Adapter:
        """Loads an adapter on all executors, or on none. Raises RpcError."""
        if not (able := self._able()):
            raise unserved() if self._is_served else unavailable()
        of_each = [_slots_of(driver) for driver in able]
        answers = await asyncio.gather(*(one.client.load_adapter(wanted) for one in able), return_exceptions=True)
        loaded = {answer.digest: answer for answer in answers if isinstance(answer, Adapter)}
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if not errors and len(loaded) == 1:
            for slots in of_each:
                slots.on_loaded(next(iter(loaded)))
            return next(iter(loaded.values()))
        for digest in loaded:
            await self._drop(digest, wanted.name)
        if errors:
            raise of_executor(errors[0]) if isinstance(errors[0], grpc.aio.AioRpcError) else errors[0]
        what = f"executors found different contents at {wanted.path}; give all of them the same files"
        raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, what, [("path", what)])

    async def _drop(self, digest: str, name: str) -> None:
        """Makes all executors forget contents under a name that does not stand for them."""
        current = self.registry.named(name)
        if self.registry.of_digest(digest) is None:
            await self._forget(digest)
        elif current is None or current.digest != digest:
            await self._forget(digest, name)

    async def _forget(self, digest: str, name: str = "") -> None:
        """Makes all executors forget contents. name: only under this name, as others stand for them."""
        able = self._able()
        for driver in () if name else able:
            _slots_of(driver).forget(digest)
        await asyncio.gather(*(driver.client.unload_adapter(digest, name) for driver in able), return_exceptions=True)

    async def _sweep(self) -> None:
        """Makes executors forget adapters without a name that no request has needed for a while."""
        try:
            while retired := self.registry.retired:
                now = time.monotonic()
                needed = {one.adapter_digest for one in self._live()}
                self._unused_since = {one: self._unused_since.get(one, now) for one in retired - needed}
                for digest in [one for one, since in self._unused_since.items() if now - since >= _UNUSED_S]:
                    async with self._changing:
                        needed = {one.adapter_digest for one in self._live()}  # now: the lock may have taken long
                        if digest in self.registry.retired - needed:
                            self.registry.forget(digest)
                            await self._forget(digest)
                await asyncio.sleep(_LOOK_S)
        finally:
            self._sweeping = None

    def _able(self) -> list[ReplicaDriver]:
        """Returns the drivers of the executors with slots."""
        return [one for one in self._drivers.values() if one.has_executor and _slots_of(one).num_slots]

    @property
    def _is_served(self) -> bool:
        return any(driver.has_executor for driver in self._drivers.values())

    def stop(self) -> None:
        for task in (*self._tasks, *self._finding.values(), *filter(None, [self._sweeping])):
            task.cancel()


def _slots_of(driver: ReplicaDriver) -> AdapterSlots:
    slots = driver.replica.slots
    assert isinstance(slots, AdapterSlots)
    return slots
