"""The processes of one line: they start, fall asleep, wake and end."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pagewire.config import ServeConfig
from pagewire.errors import StartupError
from pagewire.files.file_form import check_weights
from pagewire.files.models import default_served_name, find_model
from pagewire.files.writing import unwritable
from pagewire.flags import refusals
from pagewire.flags.lines import LineSettings
from pagewire.process.socket_directory import check_socket_directory
from pagewire.process.supervisor import Group, Supervisor
from pagewire.stack.line_services import address_of, line_services, names_of
from pagewire.stack.lines import sizes
from pagewire.stack.lines.line import Load

if TYPE_CHECKING:
    import grpc

    from pagewire.v1 import inference_pb2

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CALL_S = 2.0  # for an answer of a service that is well
_RETRY_S = 0.2
# Services that are not well for this much longer than --recovery-timeout start anew.
_MARGIN_S = 30.0


def resolved(config: ServeConfig) -> ServeConfig:
    """Returns the configuration with the model's name and files, which are downloaded if needed. Raises
    StartupError."""
    served_name = config.served_model_name or default_served_name(config.model)
    config = replace(config, served_model_name=served_name, model=str(find_model(config)), revision=None, gguf=None)
    refusals.check(config)  # a model that was just downloaded may refuse flags
    return config


async def _in_thread(work: Callable[[], T]) -> T:
    """Runs work, such as a download, in a thread that does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: Exception | None) -> None:
        if not done.done():
            done.set_exception(error) if error is not None else done.set_result(cast(T, result))

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except Exception as error:  # it is raised where the result is awaited
            failure = error
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, result, failure)

    threading.Thread(target=run, name="files of a model", daemon=True).start()
    return await done


class LineProcesses:
    """The processes of one line, in a directory of their own."""

    def __init__(
        self,
        settings: LineSettings,
        directory: Path,
        supervisor: Supervisor,
        share: Callable[[], float],
        *,
        label: str = "",
        found: ServeConfig | None = None,
    ) -> None:
        """share: of memory that all lines use. found: the resolved configuration, if it is known already. label: of
        the processes, in the log."""
        self._settings, self._directory, self._supervisor = settings, directory, supervisor
        self._share, self._label, self._found = share, label, found
        self._group: Group | None = None
        self._channel: grpc.aio.Channel | None = None
        self.address = address_of(directory, "tokenizer")

    @property
    def waits_for(self) -> list[str]:
        """The names of services that are not ready."""
        return [] if self._group is None else [name.removesuffix(self._label) for name in self._group.waits_for]

    def begin(self) -> None:
        """Starts the processes of a line, once its files are known. Raises StartupError."""
        assert self._found is not None
        config, one = self._found, self._settings
        check_socket_directory(self._directory, names_of(config))
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise unwritable(self._directory, error) from error
        # The stack itself puts lines to sleep.
        services = line_services(
            replace(config, idle_timeout=0.0),
            self._directory,
            one.config,
            has_grpc=one.has_grpc,
            share=self._share(),
            label=self._label,
        )
        self._group = self._supervisor.add(services)

    async def prepare(self) -> None:
        """Finds the files of the model, which are downloaded if needed, and looks at them: a model that is damaged must
        not take the place of others. Raises StartupError."""

        def find() -> ServeConfig:
            found = resolved(self._settings.config)
            if found.load_format != "dummy":
                check_weights(Path(found.model))
            return found

        self._found = await _in_thread(find)

    async def start(self) -> None:
        """Starts the processes, and returns when they serve. Raises StartupError with the reason."""
        if self._group is None:
            if self._found is None:
                await self.prepare()
            self.begin()
        assert self._group is not None
        try:
            await self._group.until_ready()
        except StartupError as error:
            raise StartupError(self._group.reason or str(error)) from error

    async def end(self) -> None:
        """Ends the processes; requests that run may finish. A second call waits for the first."""
        group = self._group
        if group is not None:
            await self._supervisor.remove(group)
            self._group = self._found = None
        channel, self._channel = self._channel, None
        if channel is not None:
            # Without time to end, gRPC would cancel what awaits a call, such as the watch over all lines.
            await channel.close(2 * _CALL_S)
        if self._label:  # it has a directory of its own, in that of the stack
            shutil.rmtree(self._directory, ignore_errors=True)

    async def sleep(self) -> None:
        """Puts the model to sleep once its running requests have ended. Raises StartupError if it cannot sleep."""
        from pagewire.v1 import admin_pb2

        request = admin_pb2.SleepModelRequest(level=1, mode=admin_pb2.SLEEP_MODE_WAIT)
        await self._persist("SleepModel", request)

    async def wake(self) -> None:
        """Wakes the model, and returns when it serves. Raises StartupError with the reason if it cannot wake."""
        from pagewire.v1 import admin_pb2

        await self._persist("WakeModel", admin_pb2.WakeModelRequest())

    async def _persist(self, method: str, request: Any) -> None:
        """Calls AdminService until it answers, as its processes may be restarting. Raises StartupError with its answer,
        or once they have not been well for long."""
        import grpc

        from pagewire.v1 import admin_pb2_grpc

        since: float | None = None
        while True:
            call = getattr(admin_pb2_grpc.AdminServiceStub(self._open()), method)
            try:
                await call(request)
                return
            except grpc.aio.AioRpcError as error:
                since = since or time.monotonic()
                is_late = time.monotonic() - since > self._settings.config.recovery_timeout + _MARGIN_S
                if is_late or error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                    raise StartupError(error.details() or error.code().name) from error
            await asyncio.sleep(_RETRY_S)

    async def load(self) -> Load | None:
        """Returns what runs now; None if it is not known, as the tokenizer service or the scheduler is restarting."""
        from pagewire.v1 import inference_pb2

        answer = await self._ask("CountRequests", inference_pb2.CountRequestsRequest())
        if answer is None or not answer.HasField("sleep_level"):
            return None
        return Load(answer.num_requests, answer.idle_seconds, answer.sleep_level > 0)

    async def model(self) -> inference_pb2.Model | None:
        """Returns the model as its tokenizer service lists it; None if that does not answer."""
        from pagewire.v1 import inference_pb2

        answer = await self._ask("ListModels", inference_pb2.ListModelsRequest(page_size=1))
        return answer.models[0] if answer is not None and answer.models else None

    async def _ask(self, method: str, request: Any) -> Any:
        import grpc

        from pagewire.v1 import inference_pb2_grpc

        try:
            return await getattr(inference_pb2_grpc.InferenceServiceStub(self._open()), method)(
                request, timeout=_CALL_S
            )
        except grpc.aio.AioRpcError:
            return None

    def _open(self) -> grpc.aio.Channel:
        if self._channel is None:
            from pagewire.wire import rpc

            self._channel = rpc.channel(self.address)
        return self._channel

    async def memory(self) -> int:
        """Returns the bytes of memory of all processes; 0: it is not known."""
        if self._group is None:
            return 0
        return await asyncio.to_thread(sizes.measured, frozenset(self._group.pids))
