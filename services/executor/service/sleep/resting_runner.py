"""A runner that can be away: the device thread keeps it, whether the model sleeps or is awake."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import grpc
import torch

from pagewire.services.executor.batch.kv_cache import KVGroup
from pagewire.services.executor.models.pooling import Pooling
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.runner.adapters import Adapters
from pagewire.services.executor.runner.runner import Runner
from pagewire.services.executor.step.limits import Limits
from pagewire.services.executor.step.step import Step, StepOutput
from pagewire.wire.rpc import RpcError


def asleep() -> RpcError:
    """Returns the error of a call that needs a model which sleeps."""
    return RpcError(grpc.StatusCode.FAILED_PRECONDITION, "the model sleeps; wake it first")


@runtime_checkable
class Wrapper(Protocol):
    """A runner around the model's, which it lets go while the model sleeps."""

    def rest(self) -> Runner:
        """Lets the runner inside go, and returns it. Called on the device thread."""

    def resume(self, runner: Runner) -> Runner:
        """Returns this wrapper around another runner of the same model."""


def present_of(runner: Runner) -> Runner:
    """Returns the runner itself, if it is one that can be away."""
    return runner.present if isinstance(runner, RestingRunner) else runner


class RestingRunner:
    """A `Runner` that hands everything to the present one. Without one, it holds no rows and executes nothing."""

    def __init__(self, runner: Runner) -> None:
        self._runner: Runner | None = runner

    @property
    def present(self) -> Runner:
        """The runner itself. Raises RpcError FAILED_PRECONDITION while the model sleeps."""
        if self._runner is None:
            raise asleep()
        return self._runner

    def replace(self, runner: Runner | None) -> None:
        """Drops the present runner for another one, or for none."""
        self._runner = runner

    @property
    def model(self) -> Model:
        return self.present.model

    @property
    def device(self) -> torch.device:
        return self.present.device

    @property
    def pooling(self) -> Pooling:
        return self.present.pooling

    @property
    def limits(self) -> Limits:
        return self.present.limits

    @property
    def kv_groups(self) -> Sequence[KVGroup]:
        return self.present.kv_groups

    @property
    def adapters(self) -> Adapters:
        return self.present.adapters

    @property
    def num_requests(self) -> int:
        return 0 if self._runner is None else self._runner.num_requests

    @property
    def smallest_image(self) -> int:
        return 0 if self._runner is None else self._runner.smallest_image

    def reset(self) -> None:
        if self._runner is not None:
            self._runner.reset()

    def execute(self, step: Step, launching: Callable[[float], None] = lambda load: None) -> StepOutput:
        return self.present.execute(step, launching)

    def on_other_weights(self) -> None:
        self.present.on_other_weights()

    def record_missing(self) -> bool:
        return self._runner is not None and self._runner.record_missing()
