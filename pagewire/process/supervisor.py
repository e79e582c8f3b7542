"""Keeps a set of service processes running: starts them at once, restarts the dead, stops all in order."""

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Sequence

from pagewire.errors import StartupError
from pagewire.process.keeper import STABLE_S, Keeper, Service

__all__ = ["Group", "Service", "Supervisor"]

logger = logging.getLogger(__name__)

STILL_WAITING_S = 10.0
# One Ctrl-C may arrive twice: from the terminal and through `make`.
SAME_SIGNAL_S = 0.5
# The time that a service needs in addition to that for its requests.
STOP_MARGIN_S = 5.0


class Group:
    """Services that start together and end together, in their order. The supervisor makes it."""

    def __init__(self, keepers: Sequence[Keeper], stop_timeout: float) -> None:
        self.keepers = keepers
        self._stop_timeout = stop_timeout

    @property
    def pids(self) -> list[int]:
        """The ids of its processes; each leads a session, in which those that it started are, too."""
        return [keeper.pid for keeper in self.keepers if keeper.pid]

    @property
    def waits_for(self) -> list[str]:
        """The names of services that are not ready."""
        return [keeper.service.name for keeper in self.keepers if not keeper.is_ready.is_set()]

    @property
    def reason(self) -> str:
        """The reason for which a service ended by itself, as it said; "": none did."""
        return next((keeper.reason for keeper in self.keepers if keeper.reason), "")

    async def until_ready(self) -> None:
        """Waits until all services are ready. Raises StartupError if one cannot be started."""
        ready = asyncio.create_task(self._all_ready())
        try:
            await asyncio.wait([ready, *(k.task for k in self.keepers)], return_when=asyncio.FIRST_COMPLETED)
            for keeper in self.keepers:
                if keeper.task.done():
                    keeper.task.result()
                    raise StartupError(f"the {keeper.service.name} was ended before it was ready")
        finally:
            ready.cancel()

    async def _all_ready(self) -> None:
        for keeper in self.keepers:
            await keeper.is_ready.wait()

    async def stop(self, timeout: float | None = None, *, drain: bool = True) -> None:
        """Ends the services one after the other; each within `timeout` seconds, or else by SIGKILL."""
        for keeper in self.keepers:
            await keeper.stop(self._stop_timeout if timeout is None else timeout, drain=drain)

    def kill(self) -> None:
        """Ends the services at once."""
        for keeper in self.keepers:
            keeper.kill()


class Supervisor:
    """Runs services, and stops them in their order, one after the other or all at once. Groups of services come and go
    meanwhile."""

    def __init__(
        self,
        services: Sequence[Service],
        *,
        shutdown_timeout: float,
        stop_together: bool = False,
        hang_timeout: float = 0.0,
        stable_after: float = STABLE_S,
        takes_signals: bool = True,
    ) -> None:
        """shutdown_timeout: seconds in which a service lets its requests finish.

        hang_timeout: seconds without a sign of life after which a service is killed; 0: never.

        stable_after: seconds of readiness after which the delay of a restart is reset.

        takes_signals: False if another program owns the process or its main thread; then only stop() ends the run.
        """
        self._services = services
        self._takes_signals = takes_signals
        self._stable_after, self._hang_timeout = stable_after, hang_timeout
        self._stop_together = stop_together
        self._stop_timeout = shutdown_timeout + STOP_MARGIN_S
        self._keepers: list[Keeper] = []
        self._groups: list[Group] = []
        self._failure: StartupError | None = None
        self._stop = asyncio.Event()
        self._stop_time = 0.0
        self._drains = True
        self._killed = False

    async def run(self, on_ready: Callable[[], None]) -> int:
        """Runs all services until a signal, and returns the exit code of this process.

        on_ready() is called once all are ready, with the groups that were added before. After SIGTERM, running
        requests may finish; SIGINT (Ctrl-C) and SIGHUP cut them off. A second signal kills. Raises StartupError, after
        it stopped everything, if a service cannot be started.
        """
        loop = asyncio.get_running_loop()
        signals = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # under nohup the terminal may go
            signals.append(signal.SIGHUP)
        if not self._takes_signals:
            signals = []
        for number in signals:
            loop.add_signal_handler(number, self._on_signal, number)
        self._keepers = [Keeper(service, self._stable_after, self._hang_timeout) for service in self._services]
        stopping = asyncio.create_task(self._stop.wait())
        announcing = asyncio.create_task(self._announce(on_ready))
        try:
            await asyncio.wait([stopping, *(k.task for k in self._keepers)], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            announcing.cancel()
            failed = [k.task.exception() for k in self._keepers if k.task.done() and not k.task.cancelled()]
            failed.append(self._failure)
            await self._stop_all()
            for number in signals:
                loop.remove_signal_handler(number)
        for error in failed:
            if error is not None:
                raise error
        return 130 if self._killed else 0

    def stop(self) -> None:
        """Makes run() stop everything and return."""
        self._stop.set()

    def fail(self, error: StartupError) -> None:
        """Makes run() stop everything and raise this error."""
        self._failure = error
        self._stop.set()

    def add(self, services: Sequence[Service]) -> Group:
        """Starts services as a group, on the running event loop. It ends with remove(), or with run(). Raises
        StartupError if everything is stopped already."""
        if self._stop.is_set():
            raise StartupError("the stack ends")
        group = Group([Keeper(one, self._stable_after, self._hang_timeout) for one in services], self._stop_timeout)
        self._groups.append(group)
        return group

    async def remove(self, group: Group, *, drain: bool = True) -> None:
        """Ends the services of a group; they do not start again."""
        await group.stop(drain=drain)
        if group in self._groups:
            self._groups.remove(group)

    async def wait_stopping(self) -> None:
        """Waits until stop() or a signal."""
        await self._stop.wait()

    async def _stop_all(self) -> None:
        timeout = self._stop_timeout if self._drains else STOP_MARGIN_S
        if self._stop_together:
            await asyncio.gather(*(keeper.stop(timeout, drain=self._drains) for keeper in self._keepers))
            return
        for keeper in self._keepers:
            await keeper.stop(timeout, drain=self._drains)
        await asyncio.gather(*(group.stop(timeout, drain=self._drains) for group in self._groups))

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._stop.is_set():
            self._drains = number == signal.SIGTERM
            running = "running requests may finish" if self._drains else "running requests are cut off"
            logger.info("stopping, %s; a second signal kills", running)
            self._stop_time = time.monotonic()
            self._stop.set()
            return
        if time.monotonic() - self._stop_time < SAME_SIGNAL_S:
            return
        self._killed = True
        for keeper in self._of_all():
            keeper.kill()

    def _of_all(self) -> list[Keeper]:
        return [*self._keepers, *(keeper for group in self._groups for keeper in group.keepers)]

    async def _announce(self, on_ready: Callable[[], None]) -> None:
        waits = {asyncio.create_task(k.is_ready.wait()): k.service.name for k in self._of_all()}
        pending = set(waits)
        try:
            while pending:
                _, pending = await asyncio.wait(pending, timeout=STILL_WAITING_S)
                if pending:
                    logger.info("waiting for %s", ", ".join(name for task, name in waits.items() if task in pending))
        finally:
            for task in waits:
                task.cancel()
        try:
            on_ready()
        except Exception:  # no other code waits for this task
            logger.exception("all services are ready, but announcing it failed")
