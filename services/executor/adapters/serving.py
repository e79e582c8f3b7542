"""The adapters of an executor as its scheduler sees them: loaded, put into slots, forgotten. Used on the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc

from pagewire.errors import StartupError
from pagewire.process.priority import step_back
from pagewire.services.executor.adapters import metrics
from pagewire.services.executor.adapters.directory import Directory
from pagewire.services.executor.adapters.host import HostAdapter
from pagewire.services.executor.adapters.loading import Read, described
from pagewire.services.executor.adapters.low_rank import AdapterError
from pagewire.services.executor.adapters.slots import AdapterSlots
from pagewire.services.executor.runner.adapters import Adapters
from pagewire.services.executor.step.failures import Cause, Failure
from pagewire.services.executor.step.step import NewRequest, SlotChange, Step
from pagewire.v1.common_pb2 import Adapter
from pagewire.v1.executor_pb2 import DescribeResponse
from pagewire.wire.model_names import unservable
from pagewire.wire.rpc import RpcError

logger = logging.getLogger(__name__)

_NO_SLOTS = "this executor serves no adapters; start it with --enable-lora"


class ServedAdapters:
    """Reads adapters while steps go on, and hands them to the steps that put them into slots."""

    def __init__(
        self, slots: Adapters, read: Read, directory: str | None = None, drop: Callable[[str], None] | None = None
    ) -> None:
        """slots: the runner's. directory: in which adapters are looked for. drop: lets the other ranks forget contents
        that no step needs any more."""
        self._slots = slots if isinstance(slots, AdapterSlots) else None
        self._read = read
        self._directory = None if directory is None else Directory(directory)
        self._drop = drop
        self._leaving: dict[str, weakref.ref[HostAdapter]] = {}  # by digest: steps may still hold them
        self._reading = asyncio.Lock()  # one adapter after the other
        self._reader = ThreadPoolExecutor(1, "adapters", initializer=step_back)
        self._looker = ThreadPoolExecutor(1, "adapter-directory", initializer=step_back)
        self._unread: dict[int, Failure] = {}  # by slot: why it holds nothing
        self._ahead: asyncio.Task[None] | None = None  # reads what a later step needs

    async def describe(self) -> DescribeResponse:
        if self._slots is None:
            return DescribeResponse()
        given = self._slots.host.given()
        response = DescribeResponse(max_adapters=self._slots.num_slots, adapters=given)
        if (directory := self._directory) is not None:
            found = await asyncio.get_running_loop().run_in_executor(self._looker, directory.look)
            response.adapter_directory = directory.path
            response.found_adapters.extend(found)
        return response

    async def load(self, wanted: Adapter) -> Adapter:
        if self._slots is None:
            raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, _NO_SLOTS)
        if not wanted.path:
            message = f"the adapter {wanted.name!r:.100} has no path; name its folder or file on the executor's machine"
            raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, message)
        # The caller may disconnect meanwhile.
        found = described(wanted, await asyncio.shield(asyncio.create_task(self._held(self._slots, wanted))))
        self._slots.host.give(found)
        if wanted.digest:  # a request with these contents waits
            self._slots.host.expect(found.digest)
            self._read_ahead()
        if self._directory is not None:
            self._directory.show(wanted.name)
        return found

    def unload(self, digest: str, name: str) -> None:
        """Forgets contents. name: only that it was given for them, if others were as well; empty: under all names.
        digest: empty: only takes the name away."""
        if self._slots is None:
            return
        if digest:
            self._leave(self._slots.host.forget(digest, name))
        else:
            self._slots.host.forget_name(name)
            if self._directory is not None:
                self._directory.hide(name)

    def _read_located(self, slots: AdapterSlots, located: Adapter) -> HostAdapter:
        """Reads an adapter; if it lies in the directory, notes the outcome there."""
        directory, name = self._directory, None
        if directory is None or (name := directory.name_of(located.path)) is None:
            return self._read(slots, located)
        stamp = directory.stamp(name)
        try:
            adapter = self._read(slots, located)
        except (AdapterError, StartupError) as error:
            cause = error.__cause__  # of other ranks, nothing is known but that they failed
            may_pass = isinstance(cause, OSError) and not isinstance(cause, PermissionError)
            directory.on_read(name, stamp, problem=str(error), may_pass=may_pass or isinstance(error, StartupError))
            raise
        directory.on_read(name, stamp, adapter.digest)
        return adapter

    async def _held(self, slots: AdapterSlots, located: Adapter) -> HostAdapter:
        """Returns an adapter that is in memory now. Raises RpcError."""
        if (held := slots.host.get(located.digest)) is not None:
            return held
        async with self._reading:
            if (held := slots.host.get(located.digest)) is not None:
                return held
            self._leaving.pop(located.digest, None)
            started = time.perf_counter()
            try:
                adapter = await asyncio.get_running_loop().run_in_executor(
                    self._reader, self._read_located, slots, located
                )
            except FileNotFoundError as error:
                raise RpcError(grpc.StatusCode.NOT_FOUND, str(error)) from error
            except MemoryError as error:
                message = f"there is no host memory for the adapter {located.name}; lower --max-cpu-loras"
                raise RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, message) from error
            except (AdapterError, StartupError, OSError) as error:
                why = f"{located.path} cannot be read ({error.strerror})" if isinstance(error, OSError) else error
                raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, unservable(located.name, str(why))) from error
            seconds = time.perf_counter() - started
            metrics.ADAPTER_LOAD_SECONDS.observe(seconds)
            logger.info("loaded adapter %s (%.12s) in %.3f s", located.name, adapter.digest, seconds)
            self._leaving.pop(adapter.digest, None)
            self._leave(slots.host.keep(adapter), has_read=True)
            return adapter

    def _leave(self, adapters: Iterable[HostAdapter], *, has_read: bool = False) -> None:
        """Lets other ranks forget what has left memory here, once no step that waits for the device holds it, and not
        while all ranks read an adapter, which may be the same. has_read: they have just read one."""
        if self._drop is None:
            return
        self._leaving |= {adapter.digest: weakref.ref(adapter) for adapter in adapters}
        del adapters
        if self._reading.locked() and not has_read:
            return  # until the next read
        for digest in [digest for digest, adapter in self._leaving.items() if adapter() is None]:
            del self._leaving[digest]
            self._drop(digest)

    async def attach(self, step: Step) -> Step:
        """Returns the step with the adapters that its slots are to hold. Requests of an adapter that can no longer be
        read fail; nothing else does."""
        if self._slots is None:
            return step
        if step.step_id == 1:
            self._unread.clear()  # a stream begins with empty slots
        if step.slot_changes:
            step = replace(step, slot_changes=[await self._attached(change) for change in step.slot_changes])
            self._read_ahead()
        if self._unread and step.new_requests:
            step = replace(step, new_requests=[self._checked(request) for request in step.new_requests])
        return step

    async def _attached(self, change: SlotChange) -> SlotChange:
        assert self._slots is not None
        self._unread.pop(change.slot, None)
        held, origin = self._slots.host.get(change.digest), self._slots.host.origin(change.digest)
        self._slots.host.on_placed(change.digest)
        if held is None and origin is not None:  # it had to leave memory since it was loaded
            try:
                held = await self._held(self._slots, origin)
            except RpcError as error:
                logger.error("slot %d holds nothing: %s", change.slot, error)
                self._unread[change.slot] = Failure(Cause.ADAPTER, error.message)
        elif held is None:
            self._unread[change.slot] = Failure(
                Cause.ADAPTER, f"there is no adapter {change.digest[:12]}: load it first"
            )
        return replace(change, adapter=held)

    async def on_sleep(self) -> None:
        """Waits until nothing is read for the model, which is about to be dropped. Adapters in memory stay there."""
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead = None
        async with self._reading:  # a thread may still read for a task that was cancelled
            await asyncio.get_running_loop().run_in_executor(self._reader, int)

    def on_wake(self, slots: Adapters) -> None:
        """Takes in the slots of the model that was loaded again, with the adapters in memory that the former ones
        had."""
        if self._slots is not None and isinstance(slots, AdapterSlots):
            self._slots = slots

    def _read_ahead(self) -> None:
        """Begins to read the next adapter that a step is going to need, so that the step need not wait for it."""
        if self._slots is not None and self._ahead is None and (absent := self._slots.host.absent()) is not None:
            self._ahead = asyncio.create_task(self._ahead_of_step(self._slots, absent), name="read adapters")

    async def _ahead_of_step(self, slots: AdapterSlots, adapter: Adapter) -> None:
        try:
            await self._held(slots, adapter)
        except RpcError as error:
            logger.warning("adapter %s cannot be read any longer: %s", adapter.name, error)
            slots.host.on_placed(adapter.digest)  # its step tries again
        self._ahead = None
        self._read_ahead()

    def _checked(self, request: NewRequest) -> NewRequest:
        failure = self._unread.get(request.adapter_slot)
        return request if failure is None else replace(request, adapter_slot=0, failure=request.failure or failure)

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()
        for threads in (self._reader, self._looker):
            threads.shutdown(wait=False, cancel_futures=True)
