"""Copies between a GPU and the host, with stand-ins for streams: what waits for what."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pagewire.services.executor.tiers import copies
from pagewire.services.executor.tiers.contents import Key
from pagewire.services.executor.tiers.host import HostBlocks
from pagewire.services.executor.tiers.saves import Saves
from pagewire.services.executor.tiers.shared import Memory

BYTES = 32


class Stream:
    """Work in order: each piece runs once all that it waits for has run."""

    def __init__(self, device: object = None) -> None:
        self.work: list[Any] = []

    def wait_event(self, event: Event) -> None:
        self.work.append(event.run)

    def step(self) -> None:
        with LOCK:
            if self.work:
                self.work.pop(0)()

    def run(self) -> None:
        while self.work:
            self.step()


class Event:
    """A point in a stream."""

    def record(self, stream: Stream) -> None:
        self._is_over = threading.Event()
        self._stream = stream
        stream.work.append(self._is_over.set)

    def run(self) -> None:
        while not self._is_over.is_set():
            self._stream.step()

    synchronize = run


LOCK = threading.RLock()  # the device does one thing at a time
STEPS = Stream()
current = [STEPS]


@contextmanager
def on(stream: Stream) -> Iterator[None]:
    current.append(stream)
    yield
    current.pop()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    cuda = SimpleNamespace(Stream=Stream, Event=Event, stream=on, current_stream=lambda device: current[-1])
    monkeypatch.setattr(copies.torch, "cuda", cuda)
    copy = torch.Tensor.copy_

    def later(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        assert non_blocking and current[-1] is not STEPS, "steps go on beside copies"
        current[-1].work.append(lambda: copy(target, source))
        return target

    monkeypatch.setattr(torch.Tensor, "copy_", later)
    STEPS.work.clear()
    return torch.zeros(4, BYTES, dtype=torch.uint8)


def write(cache: torch.Tensor, block: int, value: int) -> None:
    """A step that writes to a block, some time."""
    STEPS.work.append(lambda: cache[block].fill_(value))


def test_a_save_waits_for_its_step_and_later_steps_for_the_save(device: torch.Tensor) -> None:
    moved = copies.DeviceCopies([device])
    target = np.zeros(BYTES, dtype=np.uint8)
    write(device, 1, 7)
    until = moved.save(0, 1, target, moved.now())
    moved.hold_steps(until)
    write(device, 1, 9)
    assert not target.any(), "nothing waits on the host"
    STEPS.run()
    assert target.tolist() == [7] * BYTES and device[1].tolist() == [9] * BYTES


def test_a_load_waits_for_the_steps_before_it(device: torch.Tensor) -> None:
    moved = copies.DeviceCopies([device])
    write(device, 2, 7)  # of a request that has ended since
    moved.wait(moved.load(0, 2, np.full(BYTES, 5, dtype=np.uint8), moved.now()))
    assert device[2].tolist() == [5] * BYTES


def test_what_is_saved_is_what_the_step_wrote_although_the_next_one_is_launched(device: torch.Tensor) -> None:
    host = HostBlocks(Memory([4], [BYTES]), is_tier=True)
    host.open("f")
    saves = Saves(copies.DeviceCopies([device]), host, None)
    saves.start()
    key: Key = 0, b"k" * 32
    write(device, 3, 1)
    saves.add("f", [(key, 3)])
    saves.release([(0, 3)])
    write(device, 3, 2)
    STEPS.run()
    saves.wait(None, 10)
    slot = host.find(key)
    assert slot is not None and slot.contents.tolist() == [1] * BYTES
    saves.close(5)
