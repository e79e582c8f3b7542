"""The servicer with the parts that the executor's process gives it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from pagewire.config import ExecutorConfig
from pagewire.services.executor.adapters.loading import load_adapter
from pagewire.services.executor.adapters.serving import ServedAdapters
from pagewire.services.executor.main import make_grammars
from pagewire.services.executor.parallel.group import ALONE_GROUP
from pagewire.services.executor.runner.executor_info import ExecutorInfo
from pagewire.services.executor.service.controls import Controls
from pagewire.services.executor.service.convert import first_weights
from pagewire.services.executor.service.replacement import Replacements, load_weights
from pagewire.services.executor.service.seams import Features, Grammars
from pagewire.services.executor.service.sleep.rest import Rest, start_again
from pagewire.services.executor.service.sleep.sleeping import Sleeping
from pagewire.services.executor.service.worker import Worker
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
        rest = Rest(config, Path(config.model), info, partial(start_again, config.model, ALONE_GROUP))
        sleep = Sleeping(worker, config, rest, weights, adapters)
        return Features(make(info), weights, adapters, served_tiers(config, worker.runner), sleep)

    return Controls(worker, make_features)
