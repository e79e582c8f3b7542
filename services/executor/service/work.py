"""Items of work for the device thread, in order, and for the thread that waits for results."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from pagewire.services.executor.device.clock import Clock
from pagewire.services.executor.runner.runner import Runner
from pagewire.services.executor.service.session import Session
from pagewire.services.executor.step.step import Step, StepOutput


@dataclass(frozen=True)
class Opened:
    session: Session


@dataclass(frozen=True)
class Closed:
    session: Session
    error: Exception | None = None


@dataclass(frozen=True)
class Failed:
    """A step with missing or impossible results, caused by a request, the model or the device."""

    session: Session
    error: Exception


@dataclass(frozen=True)
class Submitted:
    session: Session
    step: Step
    received_ns: int = field(default_factory=time.perf_counter_ns)


@dataclass(frozen=True)
class Called:
    function: Callable[[Runner], None]
    reason: str  # for the end of the session
    within: float | None  # seconds until a watchdog may count it as a hang; None: never
    done: Future[None] = field(default_factory=Future)


Item = Opened | Submitted | Closed | Called | Failed


class WorkObserver(Protocol):
    """Observes the work of the device thread and its order."""

    is_strict: bool  # the device thread does nothing but what the observer has seen

    def arrived(self, item: Item, put: Callable[[Item], None]) -> None:
        """Appends the item to the queue. Called on any thread."""

    def begins(self, item: Item) -> None:
        """Called when the device thread begins the item."""

    def ended(self, item: Item) -> None:
        """Called when the device thread has finished the item."""


class _NoObserver:
    is_strict = False

    def arrived(self, item: Item, put: Callable[[Item], None]) -> None:
        put(item)

    def begins(self, item: Item) -> None: ...

    def ended(self, item: Item) -> None: ...


NO_OBSERVER: WorkObserver = _NoObserver()


@dataclass(frozen=True)
class Launched:
    session: Session
    output: StepOutput
    kind: str
    num_requests: int
    clock: Clock
