"""The interface between the device thread and the code that executes steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from pagewire.services.executor.batch.kv_cache import KVGroup
from pagewire.services.executor.models.pooling import Pooling
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.runner.adapters import Adapters
from pagewire.services.executor.step.limits import Limits
from pagewire.services.executor.step.step import Step, StepOutput


class Runner(Protocol):
    """A `ModelRunner`, or the runner of rank 0, which other ranks follow."""

    @property
    def model(self) -> Model: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def pooling(self) -> Pooling: ...

    @property
    def limits(self) -> Limits: ...

    @property
    def kv_groups(self) -> Sequence[KVGroup]: ...

    @property
    def num_requests(self) -> int: ...

    @property
    def smallest_image(self) -> int: ...

    @property
    def adapters(self) -> Adapters: ...

    def reset(self) -> None: ...

    def execute(self, step: Step, launching: Callable[[float], None] = ...) -> StepOutput: ...

    def on_other_weights(self) -> None: ...

    def record_missing(self) -> bool: ...


class Begun:
    """Records whether a rank has begun its part of a step: before that, other ranks have received nothing of it. Pass
    it as `launching` to `Runner.execute`."""

    def __init__(self, launching: Callable[[float], None] = lambda load: None) -> None:
        self.is_true = False
        self._launching = launching

    def __call__(self, load: float) -> None:
        self.is_true = True
        self._launching(load)
