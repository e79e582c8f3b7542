"""Availability of executors, and the model that they serve; it ends if no executor connects in time."""

import asyncio
from collections.abc import Callable

import grpc

from pagewire.config import SchedulerConfig
from pagewire.services.scheduler.service import convert
from pagewire.services.scheduler.values.executor_info import ExecutorInfo
from pagewire.wire.rpc import RpcError


class Availability:
    """Decides whether requests are served, wait for an executor, or are refused once none has connected for
    recovery_timeout.

    `changes` yields whether requests are served now, at each change. The callbacks in `on_model_change` run when the
    model, its maximum length or its adapters change.
    """

    def __init__(
        self, config: SchedulerConfig, starting: Callable[[], list[str]], on_given_up: Callable[[RpcError], None]
    ) -> None:
        """starting: returns the addresses of executors that are there, but not ready. on_given_up: called with the
        error for the waiting requests."""
        self._config = config
        self._starting = starting
        self._on_given_up = on_given_up
        self._info: ExecutorInfo | None = None
        self._is_given_up = False
        self._moved = asyncio.Event()  # set when an executor is attached, and when the wait is given up
        self._watchdog: asyncio.TimerHandle | None = None
        self.changes: asyncio.Queue[bool] = asyncio.Queue()
        self.on_model_change: set[Callable[[], None]] = set()

    @property
    def info(self) -> ExecutorInfo | None:
        """The model and limits of the attached executors, else of the last one; None before the first."""
        return self._info

    @property
    def is_waiting(self) -> bool:
        """True while no executor is known to come: requests end unless one does in time."""
        return self._watchdog is not None

    def check(self) -> None:
        """Raises RpcError UNAVAILABLE if no executor connected in time."""
        if self._is_given_up:
            raise self._unavailable()

    async def wait_for_model(self) -> ExecutorInfo:
        """Waits for the served model, and returns it. Raises RpcError UNAVAILABLE if no executor connects in time."""
        while self._info is None:
            self.check()
            self._moved.clear()
            await self._moved.wait()
        return self._info

    def start_waiting(self) -> None:
        """Starts waiting for an executor, and gives up unless one connects in time."""
        self.stop()
        self._watchdog = asyncio.get_running_loop().call_later(self._config.recovery_timeout, self._give_up)

    def on_attached(self) -> None:
        self.stop()
        self._set(True)

    def on_all_lost(self, is_loss: bool) -> None:
        """Starts waiting after the last executor left. is_loss: False if it returns at once, which is not reported."""
        if is_loss:
            self.changes.put_nowait(False)
        self.start_waiting()

    def note(self, info: ExecutorInfo | None) -> None:
        """Takes in the common model and limits of the attached executors; None: there are none."""
        if info is None:
            return
        is_other_model = self._info is not None and convert.from_info(self._info) != convert.from_info(info)
        self._info = info
        if is_other_model:
            self.greet_again()

    def greet_again(self) -> None:
        """Reports the model to clients again: it or its adapters have changed."""
        for notify in self.on_model_change:
            notify()

    def stop(self) -> None:
        """Stops waiting for an executor."""
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
        if starting := self._starting():
            return RpcError(
                grpc.StatusCode.UNAVAILABLE,
                f"the executor at {', '.join(starting)} is not ready yet, as when it loads a model; try again later",
            )
        return RpcError(
            grpc.StatusCode.UNAVAILABLE,
            f"no executor was found at {self._config.executor_address} for {self._config.recovery_timeout:g} s; "
            "start it, or check --executor-address",
        )
