"""The base of runners around another one, down to the model's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import torch

from pagewire.services.executor.batch.kv_cache import KVGroup
from pagewire.services.executor.models.pooling import Pooling
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.runner.adapters import Adapters
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.runner.runner import Runner
from pagewire.services.executor.step.limits import Limits
from pagewire.services.executor.step.step import Step, StepOutput


class WrappingRunner:
    """A `Runner` that hands everything to another one, which it lets go while the model sleeps."""

    def __init__(self, runner: Runner) -> None:
        self._inner: Runner | None = runner

    @property
    def inner(self) -> Runner:
        """The runner inside."""
        assert self._inner is not None
        return self._inner

    def rest(self) -> ModelRunner:
        """Lets the model's runner go, and returns it. Called on the device thread."""
        if isinstance(self.inner, WrappingRunner):
            return self.inner.rest()
        runner, self._inner = self.inner, None
        assert isinstance(runner, ModelRunner)
        return runner

    def resume(self, runner: ModelRunner) -> Self:
        """Takes another runner of the same model into the place of the one that was let go; returns itself."""
        if isinstance(self._inner, WrappingRunner):
            self._inner.resume(runner)
        else:
            self._inner = runner
        return self

    @property
    def model(self) -> Model:
        return self.inner.model

    @property
    def device(self) -> torch.device:
        return self.inner.device

    @property
    def pooling(self) -> Pooling:
        return self.inner.pooling

    @property
    def limits(self) -> Limits:
        return self.inner.limits

    @property
    def kv_groups(self) -> Sequence[KVGroup]:
        return self.inner.kv_groups

    @property
    def num_requests(self) -> int:
        return self.inner.num_requests

    @property
    def smallest_image(self) -> int:
        return self.inner.smallest_image

    @property
    def adapters(self) -> Adapters:
        return self.inner.adapters

    def reset(self) -> None:
        self.inner.reset()

    def execute(self, step: Step, launching: Callable[[float], None] = lambda load: None) -> StepOutput:
        return self.inner.execute(step, launching)

    def on_other_weights(self) -> None:
        self.inner.on_other_weights()

    def record_missing(self) -> bool:
        return self.inner.record_missing()
