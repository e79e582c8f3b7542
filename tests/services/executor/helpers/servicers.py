"""The servicer with the parts that the executor's process gives it."""

from __future__ import annotations

from functools import partial

from pagewire.config import ExecutorConfig
from pagewire.services.executor.main import make_grammars
from pagewire.services.executor.service.convert import first_weights
from pagewire.services.executor.service.replacement import Replacements, load_weights
from pagewire.services.executor.service.servicer import ExecutorServicer
from pagewire.services.executor.service.worker import Worker


def servicer_of(worker: Worker, config: ExecutorConfig) -> ExecutorServicer:
    """Returns the servicer of a worker without other ranks. config: of grammars and of weights to load."""
    load = partial(load_weights, config)
    return ExecutorServicer(
        worker, partial(make_grammars, config), lambda info: Replacements(worker, load, first_weights(info))
    )
