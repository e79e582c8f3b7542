"""The facts that a process knows from its first start when a model that slept starts again."""

from __future__ import annotations

from dataclasses import dataclass

from pagewire.services.executor.loading.served_model import ServedModel
from pagewire.services.executor.runner.executor_info import ExecutorInfo


@dataclass(frozen=True)
class Before:
    """The earlier start. The next one has the same sizes, so that the executor stays interchangeable with others.

    served: the model, if it was kept; None: it is loaded again.
    """

    info: ExecutorInfo
    served: ServedModel | None = None
