"""Keeps the process of one service running: starts it, finds out whether it is ready, restarts it when it dies or
hangs.

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
from pagewire.process.reasons import read_reason
from pagewire.process.watchdog import HEARTBEAT_FD, HUNG, SUPERVISOR_MARGIN_S, Silence

logger = logging.getLogger(__name__)

# The delay before a restart doubles from start to start, up to MAX_BACKOFF_S for processes that end before they are
# ready. It is reset after a process was ready for STABLE_S seconds: ends far apart are unrelated.
MIN_BACKOFF_S, MAX_READY_BACKOFF_S, MAX_BACKOFF_S = 0.2, 0.8, 10.0
STABLE_S = 5.0
# After this many starts that the system killed before readiness, another attempt would not help.
MAX_KILLED_STARTS = 3
PROBE_INTERVAL_S = 0.1
# For the stacks that a hung service logs before it is killed.
STACKS_S = 1.0


@dataclass(frozen=True)
class Service:
    """A process to keep running. ready() asks it once whether it is ready, possibly before it listens."""

    name: str
    command: Sequence[str]
    ready: Callable[[], Awaitable[bool]]
    environment: Mapping[str, str] = field(default_factory=dict)


class Keeper:
    """Keeps the process of one service running, through all restarts."""

    def __init__(self, service: Service, stable_after: float, hang_timeout: float) -> None:
        self.service = service
        self._stable_after = stable_after
        self._hang_timeout = hang_timeout
        self.is_ready = asyncio.Event()
        self.reason = ""  # why the process ended by itself last, as it said
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
            self.reason = read_reason(beats)
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
