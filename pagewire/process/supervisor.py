"""Keeps a set of service processes running: starts them at once, restarts the dead, stops all in order.

A child leads its own session, so that Ctrl-C in the terminal reaches only the supervisor, and always dies with the
supervisor (`pagewire.process.process`).
"""

import asyncio
import logging
import os
import resource
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from pagewire.errors import StartupError
from pagewire.process.process import PARENT_PID, PREDECESSOR, PREDECESSOR_PID
from pagewire.process.watchdog import HEARTBEAT_FD, HUNG, SUPERVISOR_MARGIN_S, Silence

logger = logging.getLogger(__name__)

# The delay before a restart doubles from start to start, up to MAX_BACKOFF_S for processes that end before they are
# ready. It is reset after a process was ready for STABLE_S seconds: ends far apart are unrelated.
MIN_BACKOFF_S, MAX_READY_BACKOFF_S, MAX_BACKOFF_S = 0.2, 0.8, 10.0
STABLE_S = 5.0
# After this many starts that the system killed before readiness, another attempt would not help.
MAX_KILLED_STARTS = 3
PROBE_INTERVAL_S = 0.1
STILL_WAITING_S = 10.0
# One Ctrl-C may arrive twice: from the terminal and through `make`.
SAME_SIGNAL_S = 0.5
# For the stacks that a hung service logs before it is killed.
STACKS_S = 1.0
# The time that a service needs in addition to that for its requests.
STOP_MARGIN_S = 5.0


@dataclass(frozen=True)
class Service:
    """A process to keep running. ready() asks it once whether it is ready, possibly before it listens."""

    name: str
    command: Sequence[str]
    ready: Callable[[], Awaitable[bool]]
    environment: Mapping[str, str] = field(default_factory=dict)


class _Keeper:
    """Keeps the process of one service running, through all restarts."""

    def __init__(self, service: Service, stable_after: float, hang_timeout: float) -> None:
        self.service = service
        self._stable_after = stable_after
        self._hang_timeout = hang_timeout
        self.is_ready = asyncio.Event()
        self.task = asyncio.create_task(self._keep(), name=f"keep-{service.name}")
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._ever_ready = False
        self._ready_at: float | None = None  # time.monotonic(), of this life

    @property
    def pid(self) -> int:
        """The id of the process; 0 while there is none."""
        return 0 if self._process is None or self._process.returncode is not None else self._process.pid

    async def stop(self, timeout: float, *, drain: bool = True) -> None:
        """Ends the process by SIGTERM, and by SIGKILL after `timeout` seconds.

        Without drain, a service that was ready gets SIGINT, which makes it cut off running requests.
        """
        self._stopping.set()
        self._signal(signal.SIGTERM if drain or not self.is_ready.is_set() else signal.SIGINT)
        done, _ = await asyncio.wait([self.task], timeout=timeout)
        if not done:
            logger.warning("%s did not end within %g s; killing it", self.service.name, timeout)
            self.kill()
        with suppress(StartupError):
            await self.task

    def kill(self) -> None:
        self._stopping.set()
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _keep(self) -> None:
        """Runs the process again and again until stop(). Raises StartupError if it cannot be started at all."""
        backoff, killed_starts, code = MIN_BACKOFF_S, 0, 0
        while not self._stopping.is_set():
            code = await self._run(code)
            if self._stopping.is_set():
                return
            if not self._ever_ready and code != 0:
                killed_starts += 1
                # A service that ends by itself has logged the reason, which would not change.
                if (code > 0 and code != HUNG) or killed_starts == MAX_KILLED_STARTS:
                    raise StartupError(f"the {self.service.name} cannot start ({_ending(code)}): {_remedy(code)}")
            if self._ready_at is not None:
                was_stable = time.monotonic() - self._ready_at >= self._stable_after
                backoff = MIN_BACKOFF_S if was_stable else min(backoff, MAX_READY_BACKOFF_S)
            logger.warning("%s ended (%s); restarting it in %g s", self.service.name, _ending(code), backoff)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), backoff)
            backoff = min(2 * backoff, MAX_BACKOFF_S)

    async def _run(self, code_before: int) -> int:
        """Runs the process once, and returns its exit code, negative for a signal. code_before: that of the previous
        run."""
        beats, beats_of_child = os.pipe()
        os.set_blocking(beats, False)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.service.command,
                env={
                    **self.service.environment,
                    PARENT_PID: str(os.getpid()),
                    HEARTBEAT_FD: str(beats_of_child),
                    PREDECESSOR: str(code_before),
                    PREDECESSOR_PID: str(self._process.pid if self._process is not None else 0),
                },
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(beats_of_child,),
            )
        finally:
            os.close(beats_of_child)
        if self._stopping.is_set():
            self._signal(signal.SIGTERM)
        started = time.monotonic()
        self._ready_at = None
        watching = asyncio.create_task(self._watch(started, beats))
        try:
            return await self._process.wait()
        finally:
            watching.cancel()
            os.close(beats)
            self.is_ready.clear()
            # Processes that the service started end with it.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _watch(self, started: float, beats: int) -> None:
        """Waits until the service is ready, and then kills it if it hangs. How long a start takes cannot be known.

        SIGABRT makes a process log its stacks, whatever holds the interpreter; SIGKILL also ends a stopped one.
        """
        await self._probe(started)
        if not self._hang_timeout:
            return
        silence, has_beaten = Silence(self._hang_timeout + SUPERVISOR_MARGIN_S), False
        while not (has_beaten and silence.lasts()):
            await asyncio.sleep(silence.step)
            if _drain(beats):
                silence.broken()
                has_beaten = True
        logger.error(
            "%s hangs: no sign of life for %g s (--hang-timeout); killing it", self.service.name, silence.timeout
        )
        assert self._process is not None
        _forbid_core_dump(self._process.pid)
        self._signal(signal.SIGABRT)
        await asyncio.sleep(STACKS_S)
        self._signal(signal.SIGKILL)

    async def _probe(self, started: float) -> None:
        while True:
            if await self.service.ready():
                break
            await asyncio.sleep(PROBE_INTERVAL_S)
        self._ready_at = time.monotonic()
        logger.info("%s is ready after %.1f s", self.service.name, self._ready_at - started)
        self._ever_ready = True
        self.is_ready.set()


class Group:
    """Services that start together and end together, in their order. The supervisor makes it."""

    def __init__(self, keepers: Sequence[_Keeper], stop_timeout: float) -> None:
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

    async def until_ready(self) -> None:
        """Waits until all services are ready. Raises StartupError if one cannot be started."""
        ready = asyncio.ensure_future(asyncio.gather(*(keeper.is_ready.wait() for keeper in self.keepers)))
        try:
            await asyncio.wait([ready, *(k.task for k in self.keepers)], return_when=asyncio.FIRST_COMPLETED)
            for keeper in self.keepers:
                if keeper.task.done():
                    keeper.task.result()
        finally:
            ready.cancel()

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
        self._keepers: list[_Keeper] = []
        self._groups: list[Group] = []
        self._failure: StartupError | None = None
        self._stop = asyncio.Event()
        self._stop_time = 0.0
        self._drains = True
        self._killed = False

    async def run(self, on_ready: Callable[[], None]) -> int:
        """Runs all services until a signal, and returns the exit code of this process.

        on_ready() is called once all are ready, with the groups that were added before. After SIGTERM, running requests may finish; SIGINT (Ctrl-C) and SIGHUP
        cut them off. A second signal kills. Raises StartupError, after it stopped everything, if a service cannot be
        started.
        """
        loop = asyncio.get_running_loop()
        signals = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # under nohup the terminal may go
            signals.append(signal.SIGHUP)
        if not self._takes_signals:
            signals = []
        for number in signals:
            loop.add_signal_handler(number, self._on_signal, number)
        self._keepers = [_Keeper(service, self._stable_after, self._hang_timeout) for service in self._services]
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
        """Starts services as a group, on the running event loop. It ends with remove(), or with run()."""
        group = Group([_Keeper(one, self._stable_after, self._hang_timeout) for one in services], self._stop_timeout)
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

    def _of_all(self) -> list[_Keeper]:
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


def _forbid_core_dump(pid: int) -> None:
    """Keeps a process from writing its memory to a file; the stacks that it logs are enough."""
    if hasattr(resource, "prlimit"):  # Linux
        with suppress(ProcessLookupError, PermissionError):
            _, most = resource.prlimit(pid, resource.RLIMIT_CORE)
            # 0 would not stop a program that core_pattern names (core(5)).
            resource.prlimit(pid, resource.RLIMIT_CORE, (min(1, most), most))


def _drain(pipe: int) -> bool:
    """Empties a pipe, and returns whether it contained anything."""
    with suppress(BlockingIOError):
        return bool(os.read(pipe, 65536))
    return False


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def _remedy(code: int) -> str:
    if code == -signal.SIGKILL:
        return (
            "the system kills processes when memory runs out; use a smaller model, a smaller --kv-cache-memory-bytes or"
            " more memory"
        )
    return "see its error above"
