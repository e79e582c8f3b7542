"""The clock of a step on CUDA, with events for which a test sets the time."""

from contextlib import nullcontext

import pytest
import torch

from pagewire.services.executor.device import clock


class FakeEvent:
    now_ms = 0.0
    device = torch.device("cuda", 0)

    def __init__(self, enable_timing: bool, blocking: bool = False) -> None:
        assert enable_timing
        self.time_ms: float | None = None

    def record(self) -> None:
        self.time_ms = FakeEvent.now_ms

    def synchronize(self) -> None:
        assert self.time_ms is not None

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert self.time_ms is not None and end.time_ms is not None
        return end.time_ms - self.time_ms


def step_clock(launching_ms: float | None, launched_ms: float) -> clock.Clock:
    step = clock.Clock(True, received_ns=0)
    if launching_ms is not None:
        FakeEvent.now_ms = launching_ms
        step.launching()
    FakeEvent.now_ms = launched_ms
    step.launched()
    return step


def test_idle_time_on_cuda_lasts_until_the_step_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock.torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(clock.torch.cuda, "device", nullcontext)
    first, second, empty = step_clock(10, 50), step_clock(53, 90), step_clock(None, 91)
    assert [step.wait_ns() for step in (first, second, empty)] == [40_000_000, 37_000_000, 0]
    assert second.idle_ns(first) == 3_000_000
    assert empty.idle_ns(second) == 1_000_000
