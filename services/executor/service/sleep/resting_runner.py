"""A runner that can be away: the device thread keeps it, whether the model sleeps or is awake."""

from __future__ import annotations

from typing import Self

import grpc

from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.runner.runner import Runner
from pagewire.services.executor.runner.wrapping_runner import WrappingRunner
from pagewire.wire.rpc import RpcError


def asleep() -> RpcError:
    """Returns the error of a call that needs a model which sleeps."""
    return RpcError(grpc.StatusCode.FAILED_PRECONDITION, "the model sleeps; wake it first")


class RestingRunner(WrappingRunner):
    """A `Runner` around all others. While the model's runner is away, it holds no rows and executes nothing."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self._is_away = False

    @property
    def inner(self) -> Runner:
        """The runner inside. Raises RpcError FAILED_PRECONDITION while the model sleeps."""
        if self._is_away:
            raise asleep()
        return super().inner

    def rest(self) -> ModelRunner:
        runner = super().rest()
        self._is_away = True
        return runner

    def resume(self, runner: ModelRunner) -> Self:
        super().resume(runner)
        self._is_away = False
        return self

    @property
    def num_requests(self) -> int:
        return 0 if self._is_away else super().num_requests

    @property
    def smallest_image(self) -> int:
        return 0 if self._is_away else super().smallest_image

    def reset(self) -> None:
        if not self._is_away:
            super().reset()

    def record_missing(self) -> bool:
        return not self._is_away and super().record_missing()
