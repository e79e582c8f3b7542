"""The runner of an executor with tiers: it starts loads before a step and saves after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from pagewire.services.executor.batch.kv_cache import KVGroup
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.runner.wrapping_runner import WrappingRunner
from pagewire.services.executor.step.step import Step, StepOutput
from pagewire.services.executor.tiers.contents import Key
from pagewire.services.executor.tiers.loads import Load
from pagewire.services.executor.tiers.tiers import Tiers


@dataclass(frozen=True)
class TieredStep(Step):
    """A step that also moves blocks."""

    saves: Sequence[tuple[Key, int]] = ()  # (key, block id)s, complete once the step is done
    loads: Sequence[Load] = ()


class TieredRunner(WrappingRunner):
    """A `Runner` that saves and loads blocks beside the steps. A step that writes to no block on its way
    takes no longer."""

    def __init__(self, runner: ModelRunner, tiers: Tiers) -> None:
        super().__init__(runner)
        self.tiers = tiers

    def execute(self, step: Step, launching: Callable[[float], None] = lambda load: None) -> StepOutput:
        tiers = self.tiers
        if not tiers.saves.is_idle:
            tiers.saves.release(_written(step, self.limits.block_size, self.kv_groups))
        if not isinstance(step, TieredStep):
            return super().execute(step, launching)
        for load in step.loads:
            tiers.saves.release((group, block) for (group, _), block in load.blocks)
            self._let_drafters_know(load)
            tiers.load(load)
        output = super().execute(step, launching)
        if step.saves:
            tiers.save(step.saves)
        return output

    def _let_drafters_know(self, load: Load) -> None:
        assert isinstance(self.inner, ModelRunner)
        for group in range(len(self.kv_groups)):
            ids = [block for (place, _), block in load.blocks if place == group]
            self.inner.proposer.on_other_contents(group, np.array(ids, dtype=np.int64))

    def rest(self) -> ModelRunner:
        self.tiers.rest()  # what is saved stays
        return super().rest()

    def resume(self, runner: ModelRunner) -> Self:
        self.tiers.copies.bind(runner.kv_caches[: len(runner.kv_groups)])
        return super().resume(runner)

    def reset(self) -> None:
        self.tiers.loads.cancel()
        super().reset()

    def on_other_weights(self) -> None:
        self.tiers.on_other_weights()
        super().on_other_weights()


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
