"""The adapters of the service: which there are, on which executors they are loaded, and the requests that need them.

A request is pinned to the contents (the digest) that its adapter's name stands for when it arrives. Before it waits for
a step, an executor has read the adapter: steps wait for a disk only if requests wait for more than `--max-cpu-loras`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from weakref import WeakValueDictionary

import grpc

from pagewire.services.scheduler.adapters.errors import gone, not_found, unserved
from pagewire.services.scheduler.adapters.loading import Loader, slots_of
from pagewire.services.scheduler.adapters.metrics import METRICS, OTHER
from pagewire.services.scheduler.adapters.names import Names
from pagewire.services.scheduler.adapters.registry import Registry
from pagewire.services.scheduler.adapters.tasks import Tasks
from pagewire.services.scheduler.service.replica_driver import ReplicaDriver
from pagewire.services.scheduler.values.executor_info import Adapter
from pagewire.services.scheduler.values.request import Request
from pagewire.v1.scheduler_link_pb2 import TokenSubmission
from pagewire.wire.rpc import RpcError

logger = logging.getLogger(__name__)

# Seconds in which tokenizer services resubmit requests after a restart, and executors connect, which know the adapters.
_RESUBMITTED_S = 5.0
# Seconds without a live request after which executors forget an adapter without a name. Requests of a tokenizer service
# that restarts are not live for a moment.
_UNUSED_S = 2 * _RESUBMITTED_S
_SWEEP_S = 1.0
_RETRY_S = 0.1
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
        check_awake: Callable[[], None] = lambda: None,
    ) -> None:
        """drivers: of all replicas, a live view. wake: called when there may be steps to decide. changed: called when
        a name stands for something else. end: ends a request with an error. check_awake: raises RpcError while the
        model sleeps."""
        self._drivers = drivers
        self._changed = changed
        self.registry = Registry()
        self._loader = Loader(drivers, self.registry, wake, self._end_waiting)
        self.names = Names(drivers, self.registry, self._loader, self._on_change, check_awake)
        self.find, self.load, self.unload = self.names.find, self.names.load, self.names.unload
        self._end = end
        self._of_requests = WeakValueDictionary[int, Request]()  # with adapters, by id
        self._unused_since: dict[str, float] = {}  # retired digest -> time.monotonic()
        self._learns_until = time.monotonic() + _RESUBMITTED_S
        self._attached = asyncio.Event()  # set and replaced when an executor has connected
        self._tasks = Tasks()
        self._sweeping: asyncio.Task[None] | None = None
        METRICS.source = self

    @property
    def listed(self) -> Sequence[Adapter]:
        """The adapters that requests may name."""
        return self.names.listed

    @property
    def num_slots(self) -> int:
        """The number of slots of the executor that has most."""
        return max((slots_of(driver).num_slots for driver in self._drivers.values()), default=0)

    @property
    def running_names(self) -> Collection[str]:
        """The adapters of running requests."""
        drivers = tuple(self._drivers.values())
        return self._names({digest for driver in drivers for digest in slots_of(driver).digests})

    @property
    def waiting_names(self) -> Collection[str]:
        """The adapters of waiting requests."""
        return self._names({one.adapter_digest for one in self._live() if one.replica_id is None})

    def _live(self) -> list[Request]:
        """Returns the requests with adapters that have not ended. May be called on any thread."""
        found = (reference() for reference in self._of_requests.valuerefs())
        return [request for request in found if request is not None and not request.is_finished]

    def _names(self, digests: Iterable[str]) -> set[str]:
        return {adapter.label for digest in digests if (adapter := self.registry.of_digest(digest)) is not None}

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
        METRICS.on_request(adapter.name or OTHER)
        while num_losses < _MAX_LOSSES:
            pending = {self._tasks.start(self._loader.try_at(driver, adapter)) for driver in self._loader.able()}
            num_losses += bool(pending)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                errors = [task.result() for task in done if not task.cancelled()]
                if None in errors:
                    return
                for error in filter(None, errors):
                    if error.code() is not grpc.StatusCode.UNAVAILABLE and not pending:
                        raise gone(f"adapter {adapter.label} cannot be used any longer: {error.details()}")
            await asyncio.sleep(_RETRY_S)
            adapter = await self._of_digest(request.adapter_digest)
        what = f"the executor was lost {_MAX_LOSSES} times in a row while it loaded the request's adapter; see its log"
        raise RpcError(grpc.StatusCode.INTERNAL, what)

    async def _of_digest(self, digest: str) -> Adapter:
        """Returns the adapter with these contents. After a start, it waits for executors that may have it."""
        while (adapter := self.registry.of_digest(digest)) is None or not self._loader.able():
            left = self._learns_until - time.monotonic()
            if left <= 0 and self._loader.is_served:
                if adapter is None:
                    raise gone("the adapter of this request is not available any longer; send the request again")
                raise unserved()
            attached = self._attached
            with suppress(TimeoutError):
                await asyncio.wait_for(attached.wait(), left if left > 0 else None)
        return adapter

    def _on_change(self) -> None:
        self._changed()
        if self._sweeping is None and self.registry.retired:
            self._sweeping = self._tasks.start(self._sweep())

    # -- executors ---------------------------------------------------------------------------------------------------

    def on_attached(self, driver: ReplicaDriver) -> None:
        """Takes in what an executor reports, and gives it what it lacks; requests with these adapters go there when it
        has them."""
        info = driver.replica.info
        assert info is not None
        if self.names.on_attached(driver, info) or self.registry.retired:
            self._on_change()
        attached, self._attached = self._attached, asyncio.Event()
        attached.set()
        unneeded = self.registry.retired - {request.adapter_digest for request in self._live()}
        for other in self._loader.able():
            has_loaded = slots_of(other).has_loaded
            lacking = [one for one in self.registry.known if not has_loaded(one.digest) and one.digest not in unneeded]
            if lacking and (other is driver or info.adapters):
                self._tasks.start(self._loader.give(other, lacking))

    def _end_waiting(self, adapter: Adapter, why: str) -> None:
        """Ends the requests that wait for an adapter that no executor has any longer."""
        for request in [one for one in self._live() if one.adapter_digest == adapter.digest and one.replica_id is None]:
            self._end(request, gone(f"adapter {adapter.label} cannot be used any longer: {why}"))

    async def _sweep(self) -> None:
        """Makes executors forget adapters without a name that no request has needed for a while."""
        try:
            while retired := self.registry.retired:
                now = time.monotonic()
                needed = {one.adapter_digest for one in self._live()}
                self._unused_since = {one: self._unused_since.get(one, now) for one in retired - needed}
                for digest in [one for one, since in self._unused_since.items() if now - since >= _UNUSED_S]:
                    async with self.names.changing:
                        needed = {one.adapter_digest for one in self._live()}  # now: the lock may have taken long
                        if digest in self.registry.retired - needed:
                            self.registry.forget(digest)
                            await self._loader.forget(digest)
                await asyncio.sleep(_SWEEP_S)
        finally:
            self._sweeping = None

    def stop(self) -> None:
        self.names.stop()
        self._tasks.stop()
