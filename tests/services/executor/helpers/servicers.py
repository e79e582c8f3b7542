"""The servicer with the parts that the executor's process gives it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from pagewire.config import ExecutorConfig
from pagewire.services.executor.adapters.loading import load_adapter
from pagewire.services.executor.adapters.serving import ServedAdapters
from pagewire.services.executor.main import make_grammars
from pagewire.services.executor.runner.executor_info import ExecutorInfo
from pagewire.services.executor.runner.runner import Runner
from pagewire.services.executor.service.controls import Controls
from pagewire.services.executor.service.convert import first_weights
from pagewire.services.executor.service.replacement import Replacements, load_weights
from pagewire.services.executor.service.seams import Features, Grammars
from pagewire.services.executor.service.sleep.resting_runner import present_of
from pagewire.services.executor.service.sleep.sleeping import Sleeping, start_again
from pagewire.services.executor.service.worker import Worker
from pagewire.services.executor.start.before import Before
from pagewire.services.executor.tiers.start import served_tiers


def servicer_of(
    worker: Worker, config: ExecutorConfig, grammars: Callable[[ExecutorInfo], Grammars] | None = None
) -> Controls:
    """Returns the servicer of a worker without other ranks.

    config: of grammars and of weights to load. grammars: instead of those of the config.
    """
    load = partial(load_weights, config)
    make = grammars or partial(make_grammars, config)

    def make_features(info: ExecutorInfo) -> Features:
        weights = Replacements(worker, load, first_weights(info))
        adapters = ServedAdapters(worker.runner.adapters, load_adapter, config.lora_dir)
        sleep = Sleeping(worker, config, Path(config.model), again, weights, adapters)
        return Features(make(info), weights, adapters, served_tiers(config, present_of(worker.runner)), sleep)

    def again(config: ExecutorConfig, before: Before) -> tuple[Runner, ExecutorInfo]:
        return start_again(config, config.model, before)

    return Controls(worker, make_features)
