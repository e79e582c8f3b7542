"""The runner of an executor with tiers: it starts loads before a step and saves after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagewire.services.executor.batch.kv_cache import KVGroup
from pagewire.services.executor.models.pooling import Pooling
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.runner.adapters import Adapters
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.runner.runner import Runner
from pagewire.services.executor.step.limits import Limits
from pagewire.services.executor.step.step import Step, StepOutput
from pagewire.services.executor.tiers.contents import Key
from pagewire.services.executor.tiers.loads import Load
from pagewire.services.executor.tiers.tiers import Tiers


@dataclass(frozen=True)
class TieredStep(Step):
    """A step that also moves blocks."""

    saves: Sequence[tuple[Key, int]] = ()  # (key, block id)s, complete once the step is done
    loads: Sequence[Load] = ()


class TieredRunner:
    """A `Runner` that saves and loads blocks beside the steps. A step that writes to no block on its way
    takes no longer."""

    def __init__(self, runner: ModelRunner, tiers: Tiers) -> None:
        self._present: ModelRunner | None = runner  # None: it rests
        self.tiers = tiers

    @property
    def _runner(self) -> ModelRunner:
        assert self._present is not None
        return self._present

    def execute(self, step: Step, launching: Callable[[float], None] = lambda load: None) -> StepOutput:
        tiers = self.tiers
        if not tiers.saves.is_idle:
            tiers.saves.release(_written(step, self.limits.block_size, self.kv_groups))
        if not isinstance(step, TieredStep):
            return self._runner.execute(step, launching)
        for load in step.loads:
            tiers.saves.release((group, block) for (group, _), block in load.blocks)
            for group in range(len(self.kv_groups)):
                ids = [block for (place, _), block in load.blocks if place == group]
                self._runner.proposer.on_other_contents(group, np.array(ids, dtype=np.int64))
            tiers.load(load)
        output = self._runner.execute(step, launching)
        if step.saves:
            tiers.save(step.saves)
        return output

    def rest(self) -> ModelRunner:
        """Lets the runner inside go, and returns it; what is saved stays. Called on the device thread."""
        self.tiers.rest()
        runner, self._present = self._runner, None
        return runner

    def resume(self, runner: Runner) -> TieredRunner:
        """Returns this runner around another one of the same model."""
        assert isinstance(runner, ModelRunner)
        self._present = runner
        self.tiers.copies.bind(runner.kv_caches[: len(runner.kv_groups)])
        return self

    def reset(self) -> None:
        self.tiers.loads.cancel()
        self._runner.reset()

    def on_other_weights(self) -> None:
        self.tiers.on_other_weights()
        self._runner.on_other_weights()

    def record_missing(self) -> bool:
        return self._runner.record_missing()

    @property
    def model(self) -> Model:
        return self._runner.model

    @property
    def device(self) -> torch.device:
        return self._runner.device

    @property
    def pooling(self) -> Pooling:
        return self._runner.pooling

    @property
    def limits(self) -> Limits:
        return self._runner.limits

    @property
    def kv_groups(self) -> Sequence[KVGroup]:
        return self._runner.kv_groups

    @property
    def num_requests(self) -> int:
        return self._runner.num_requests

    @property
    def smallest_image(self) -> int:
        return self._runner.smallest_image

    @property
    def adapters(self) -> Adapters:
        return self._runner.adapters


def _written(step: Step, block_size: int, groups: Sequence[KVGroup]) -> Iterator[tuple[int, int]]:
    """Yields the blocks, (group, block id)s, that are new to a request of the step: it may write to these, and to no
    other that is complete."""
    group_of = np.tile(np.arange(len(groups)), len(step.request_ids))
    yield from zip(np.repeat(group_of, step.num_new_blocks.ravel()).tolist(), step.new_block_ids.tolist(), strict=True)
    for request in step.new_requests:
        for group, blocks in enumerate(request.blocks):
            shared = request.num_computed_tokens // (groups[group].state_tokens or block_size)
            for block in blocks.ids[max(0, shared - blocks.first) :].tolist():
                yield group, block
