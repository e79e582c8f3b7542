"""Whether there are executors to serve requests, and what they serve; they are given up if none comes in time."""

import asyncio
from collections.abc import Callable

import grpc

from pagewire.config import SchedulerConfig
from pagewire.services.scheduler.service import convert
from pagewire.services.scheduler.values.executor_info import ExecutorInfo
from pagewire.wire.rpc import RpcError


class Availability:
    """Requests are served, or wait for an executor, or are refused as none has come for recovery_timeout.

    `changes` tells whether they are served now, whenever that changes; `on_model_change` are called when the model, or
    how long its requests may be, is another one.
    """

    def __init__(self, config: SchedulerConfig, on_given_up: Callable[[RpcError], None]) -> None:
        """on_given_up: called with the error for whoever waits."""
        self._config = config
        self._on_given_up = on_given_up
        self._info: ExecutorInfo | None = None
        self._is_given_up = False
        self._moved = asyncio.Event()  # an executor came, or all were given up
        self._watchdog: asyncio.TimerHandle | None = None
        self.changes: asyncio.Queue[bool] = asyncio.Queue()
        self.on_model_change: set[Callable[[], None]] = set()

    @property
    def info(self) -> ExecutorInfo | None:
        """Of the present executors or of the last one; None before the first."""
        return self._info

    def check(self) -> None:
        """Raises RpcError UNAVAILABLE if executors are given up."""
        if self._is_given_up:
            raise self._unavailable()

    async def wait_for_model(self) -> ExecutorInfo:
        """What is served. Raises RpcError UNAVAILABLE if no executor comes within recovery_timeout."""
        while self._info is None:
            self.check()
            self._moved.clear()
            await self._moved.wait()
        return self._info

    def start_waiting(self) -> None:
        """No executor is there: gives up unless one comes in time."""
        self.stop()
        self._watchdog = asyncio.get_running_loop().call_later(self._config.recovery_timeout, self._give_up)

    def on_attached(self) -> None:
        self.stop()
        self._set(True)

    def on_all_lost(self, is_loss: bool) -> None:
        """is_loss: False if one is back at once, so that nobody needs to know."""
        if is_loss:
            self.changes.put_nowait(False)
        self.start_waiting()

    def note(self, info: ExecutorInfo | None) -> None:
        """What the present executors can do together; None: without any, what the last could do still holds."""
        if info is None:
            return
        is_other_model = self._info is not None and convert.from_info(self._info) != convert.from_info(info)
        self._info = info
        if is_other_model:
            for notify in self.on_model_change:
                notify()

    def stop(self) -> None:
        """Gives nobody up any more."""
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None

    def _give_up(self) -> None:
        error = self._unavailable()
        self._set(False)
        self._on_given_up(error)

    def _set(self, is_available: bool) -> None:
        self._is_given_up = not is_available
        self.changes.put_nowait(is_available)
        self._moved.set()

    def _unavailable(self) -> RpcError:
        return RpcError(
            grpc.StatusCode.UNAVAILABLE,
            f"no executor at {self._config.executor_address} for {self._config.recovery_timeout:g} s; start it, or "
            "check --executor-address",
        )
