"""The lines of a running stack, with their processes and LineService."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pagewire.config import ServeConfig
from pagewire.errors import StartupError
from pagewire.flags.lines import LineSettings, StackModels
from pagewire.process.supervisor import Supervisor
from pagewire.stack.line_processes import LineProcesses
from pagewire.stack.line_services import names_of
from pagewire.stack.lines import sizes
from pagewire.stack.lines.lines import Lines
from pagewire.stack.lines.plan import Room

if TYPE_CHECKING:
    from pagewire.wire.rpc import Server

logger = logging.getLogger(__name__)

_LOOK_S = 0.1


class StackLines:
    """Starts pinned lines, and serves LineService beside the services of the stack."""

    def __init__(
        self,
        base: ServeConfig,
        models: StackModels,
        found: Mapping[str, ServeConfig],
        supervisor: Supervisor,
        directory: Path,
        address: str,
    ) -> None:
        """base: the flags of the stack. found: resolved configurations of lines, by name. address: of LineService."""
        self._base, self._models, self._found = base, models, found
        self._supervisor, self._directory, self._address = supervisor, directory, address
        room = Room(sizes.room(base, sizes.machine_memory()), base.max_loaded_models)
        self.lines = Lines(models, room, self._make, on_failure=supervisor.fail)

    def _make(self, settings: LineSettings, number: int) -> LineProcesses:
        return LineProcesses(
            settings,
            self._directory / str(number) if number else self._directory,
            self._supervisor,
            lambda: self.lines.share,
            label=f" of {settings.name}" if number else "",
            found=self._found.get(settings.name),
        )

    async def run(self, announce: Callable[[Lines], None], on_names: Callable[[Sequence[str]], None]) -> int:
        """Runs the stack until a signal, and returns the exit code. Raises StartupError.

        announce: is called once the gateway and pinned lines are ready. on_names: is called with all served names when
        they have changed.
        """

        def on_ready() -> None:
            self.lines.has_started = True
            announce(self.lines)

        for line in self.lines.lines:
            if line.settings.is_pinned:
                assert isinstance(line.processes, LineProcesses)
                line.processes.begin()  # before anything else that takes processor time
                self.lines.begin(line)
        tasks = [asyncio.create_task(self._serve(), name="lines")]
        tasks.append(asyncio.create_task(self._report(on_names), name="names of lines"))
        tasks.append(asyncio.create_task(self._end(tasks[:]), name="end of lines"))
        try:
            return await self._supervisor.run(on_ready)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _end(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Cancels the tasks once the stack stops: it ends all lines itself."""
        await self._supervisor.wait_stopping()
        for task in tasks:
            task.cancel()

    async def _serve(self) -> None:
        """Serves LineService. A failure ends the stack, which would load no line any longer."""
        server = None
        try:
            await self._until_first_socket()
            make_server = await asyncio.to_thread(_import_servicer)
            server = make_server(self.lines, self._base, self._address)
            await server.start()
            await server.set_serving(True)
            await self.lines.run()
        except Exception as error:
            logger.exception("the lines of the stack failed")
            self._supervisor.fail(StartupError(f"the lines of the stack failed: {error}"))
        finally:
            if server is not None:
                with suppress(asyncio.CancelledError):
                    await server.stop()

    async def _until_first_socket(self) -> None:
        """Waits until a service of a pinned line listens: importing gRPC before would take processor time from it."""
        pinned = [line for line in self.lines.lines if line.settings.is_pinned]
        names = names_of(pinned[0].settings.config) if pinned else []
        paths = [Path(pinned[0].processes.address.removeprefix("unix:")).with_name(f"{name}.sock") for name in names]
        while paths and not any(path.exists() for path in paths):  # noqa: ASYNC110 - of other processes
            await asyncio.sleep(_LOOK_S)

    async def _report(self, on_names: Callable[[Sequence[str]], None]) -> None:
        known = self.lines.names
        while True:
            await self.lines.changed.wait()
            if (names := self.lines.names) != known:
                known = names
                on_names(names)


def _import_servicer() -> Callable[[Lines, ServeConfig, str], Server]:
    from pagewire.stack.lines.servicer import make_server

    return make_server
