"""The adapters of an executor as its scheduler sees them: loaded, put into slots, forgotten. Used on the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc

from pagewire.errors import StartupError
from pagewire.services.executor.adapters import metrics
from pagewire.services.executor.adapters.host import HostAdapter
from pagewire.services.executor.adapters.loading import Read, described
from pagewire.services.executor.adapters.low_rank import AdapterError
from pagewire.services.executor.adapters.slots import AdapterSlots
from pagewire.services.executor.runner.adapters import Adapters
from pagewire.services.executor.service.replacement import step_back
from pagewire.services.executor.step.failures import Cause, Failure
from pagewire.services.executor.step.step import NewRequest, SlotChange, Step
from pagewire.v1.common_pb2 import Adapter
from pagewire.wire.rpc import RpcError

logger = logging.getLogger(__name__)

_NO_SLOTS = "this executor serves no adapters; start it with --enable-lora"


class ServedAdapters:
    """Reads adapters while steps go on, and hands them to the steps that put them into slots."""

    def __init__(
        self, slots: Adapters, read: Read, directory: str | None = None, drop: Callable[[str], None] | None = None
    ) -> None:
        """slots: the runner's. directory: where adapters without a path are, under their names. drop: lets the other
        ranks forget contents that no step needs any more."""
        self._slots = slots if isinstance(slots, AdapterSlots) else None
        self._read = read
        self._directory = directory
        self._drop = drop
        self._leaving: dict[str, weakref.ref[HostAdapter]] = {}  # by digest: steps may still hold them
        self._reading = asyncio.Lock()  # one adapter after the other
        self._reader = ThreadPoolExecutor(1, "adapters", initializer=step_back)
        self._unread: dict[int, Failure] = {}  # by slot: why it holds nothing
        self._ahead: asyncio.Task[None] | None = None  # reads what a later step needs

    @property
    def num_slots(self) -> int:
        return 0 if self._slots is None else self._slots.num_slots

    def given(self) -> list[Adapter]:
        return [] if self._slots is None else self._slots.host.given()

    async def load(self, wanted: Adapter) -> Adapter:
        if self._slots is None:
            raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, _NO_SLOTS)
        located = self._located(wanted)
        # The caller may disconnect meanwhile.
        found = described(located, await asyncio.shield(asyncio.create_task(self._held(self._slots, located))))
        self._slots.host.give(found)
        if wanted.digest:  # a request with these contents waits
            self._slots.host.expect(found.digest)
            self._read_ahead()
        return found

    def unload(self, digest: str, name: str) -> None:
        """Forgets contents. name: only that it was given for them, if others were as well; empty: under all names."""
        if self._slots is not None:
            self._leave(self._slots.host.forget(digest, name))

    def _located(self, wanted: Adapter) -> Adapter:
        """Returns what is wanted with a path. Raises RpcError."""
        located = Adapter()
        located.CopyFrom(wanted)
        if wanted.path:
            return located
        if self._directory is None:
            message = f"the adapter {wanted.name!r:.100} has no path, and there is no --lora-dir to find it in"
            raise RpcError(grpc.StatusCode.NOT_FOUND, message)
        if wanted.name in ("", "..") or Path(wanted.name).name != wanted.name or "\0" in wanted.name:
            message = f"{wanted.name!r:.100} is no name of a file in --lora-dir; give the name of one, without slashes"
            raise RpcError(grpc.StatusCode.NOT_FOUND, message)
        located.path = str(Path(self._directory) / wanted.name)
        return located

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
                adapter = await asyncio.get_running_loop().run_in_executor(self._reader, self._read, slots, located)
            except FileNotFoundError as error:
                raise RpcError(grpc.StatusCode.NOT_FOUND, str(error)) from error
            except MemoryError as error:
                message = f"there is no host memory for the adapter {located.name}; lower --max-cpu-loras"
                raise RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, message) from error
            except (AdapterError, StartupError, OSError) as error:
                message = f"the adapter {located.name} cannot be served: {error}"
                raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, message) from error
            seconds = time.perf_counter() - started
            metrics.ADAPTER_LOAD_SECONDS.observe(seconds)
            logger.info("loaded adapter %s (%.12s) in %.3f s", located.name, adapter.digest, seconds)
            self._leaving.pop(adapter.digest, None)
            self._leave(slots.host.keep(adapter))
            return adapter

    def _leave(self, adapters: Iterable[HostAdapter]) -> None:
        """Lets other ranks forget what has left memory here, once no step that waits for the device holds it."""
        if self._drop is None:
            return
        self._leaving |= {adapter.digest: weakref.ref(adapter) for adapter in adapters}
        del adapters
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
        self._reader.shutdown(wait=False, cancel_futures=True)
