"""Waiting for a device of which a thread knows nothing yet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pagewire.services.executor.device import clock
from pagewire.services.executor.device.results import PendingResults

SECOND = torch.device("cuda", 1)


class Event:
    """An event of the second device, as a group's second rank has it."""

    device = SECOND

    def __init__(self, *_: Any, **__: Any) -> None:
        self.waited_on: list[torch.device] = []

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        self.waited_on.append(Current.here.device)

    def elapsed_time(self, end: Event) -> float:
        return 1.0


class Current(threading.local):
    """The device that each thread is on: at first the first one."""

    device = torch.device("cuda", 0)
    here: Current


Current.here = Current()


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        before, Current.here.device = Current.here.device, device
        yield
        Current.here.device = before

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "Event", Event)


def on_a_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_a_thread_waits_for_results_on_the_device_that_computes_them() -> None:
    event = Event()
    pending = PendingResults({"token_ids": torch.tensor([5])}, event)  # type: ignore[arg-type]
    on_a_thread(pending.wait)
    assert event.waited_on == [SECOND]


def test_a_thread_waits_for_a_step_on_the_device_that_executes_it() -> None:
    step = clock.Clock(True, received_ns=0)
    step.launched()
    on_a_thread(step.wait_ns)
    assert step._events is not None
    assert step._events[1].waited_on == [SECOND]  # type: ignore[attr-defined]
