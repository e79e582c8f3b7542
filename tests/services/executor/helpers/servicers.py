"""The servicer with the parts that the executor's process gives it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pagewire.config import ExecutorConfig
from pagewire.services.executor.adapters.loading import load_adapter
from pagewire.services.executor.adapters.serving import ServedAdapters
from pagewire.services.executor.main import make_grammars
from pagewire.services.executor.runner.executor_info import ExecutorInfo
from pagewire.services.executor.service.convert import first_weights
from pagewire.services.executor.service.replacement import Replacements, load_weights
from pagewire.services.executor.service.seams import Features, Grammars
from pagewire.services.executor.service.servicer import ExecutorServicer
from pagewire.services.executor.service.worker import Worker
from pagewire.services.executor.tiers.start import served_tiers


def servicer_of(
    worker: Worker, config: ExecutorConfig, grammars: Callable[[ExecutorInfo], Grammars] | None = None
) -> ExecutorServicer:
    """Returns the servicer of a worker without other ranks.

    config: of grammars and of weights to load. grammars: instead of those of the config.
    """
    load = partial(load_weights, config)
    make = grammars or partial(make_grammars, config)
    return ExecutorServicer(
        worker,
        lambda info: Features(
            make(info),
            Replacements(worker, load, first_weights(info)),
            ServedAdapters(worker.runner.adapters, load_adapter, config.lora_dir),
            served_tiers(config, worker.runner),
        ),
    )
