"""A device that hangs is distinguished from one that is slow."""

import pytest

from pagewire.process.watchdog import Pulse
from pagewire.services.executor.service.step_watch import IMAGES_S, StepTimes, StepWatch

TIMEOUT = 8.0


class Device:
    """A watched device. The watcher looks when a test says so."""

    def __init__(self) -> None:
        self.pulse = Pulse("the device", TIMEOUT)
        self.watch = StepWatch(self.pulse)

    def step(self, load: float, seconds: float) -> bool:
        """Returns whether a step may take this long."""
        self.watch.begin()
        self.watch.launching(load)
        is_let_be = self.is_silent(seconds)
        self.watch.launched()
        self.watch.end()
        self.watch.done(seconds)
        return is_let_be

    def is_silent(self, seconds: float) -> bool:
        """Nothing happens for so long; whether that is taken to be fine."""
        looks = [self.pulse.has_stopped() for _ in range(int(seconds / 0.5))]
        return not any(looks)


def test_the_first_step_may_take_as_long_as_it_likes() -> None:
    assert Device().step(load=2048, seconds=300)


@pytest.mark.parametrize("decode_seconds", [0.1, 0.5])
def test_a_prefill_of_half_a_minute_on_a_slow_device_is_let_be(decode_seconds: float) -> None:
    device = Device()
    assert all(device.step(load=1.2, seconds=decode_seconds) for _ in range(50))
    assert device.step(load=2048 * 2, seconds=30)
    assert device.step(load=2048 * 3, seconds=45)
    assert all(device.step(load=1.2, seconds=decode_seconds) for _ in range(50))
    assert device.step(load=1500 * 3, seconds=35)


def test_a_step_that_never_ends_is_noticed_within_what_it_may_take_and_the_timeout() -> None:
    device = Device()
    assert all(device.step(load=1.2, seconds=0.1) for _ in range(50))
    device.watch.begin()
    device.watch.launching(1.2)
    assert device.is_silent(TIMEOUT)
    assert not device.is_silent(1.5)


def test_a_step_in_flight_that_never_ends_is_noticed() -> None:
    """Tests CUDA, where the device thread has gone on."""
    device = Device()
    assert all(device.step(load=1.2, seconds=0.1) for _ in range(50))
    device.watch.begin()
    device.watch.launching(1.2)
    device.watch.launched()
    device.watch.end()
    assert device.is_silent(TIMEOUT)
    assert not device.is_silent(1.5)


@pytest.mark.parametrize("encodes_images", [True, False])
def test_images_may_take_long_to_encode(encodes_images: bool) -> None:
    device = Device()
    assert all(device.step(load=1.2, seconds=0.1) for _ in range(50))
    device.watch.begin(IMAGES_S if encodes_images else 0.0)
    assert device.is_silent(IMAGES_S) == encodes_images
    device.watch.launching(1.2)
    assert not device.is_silent(TIMEOUT + 1.5), "what follows is bounded as ever"


def test_an_idle_device_is_let_be() -> None:
    device = Device()
    assert device.step(load=1.2, seconds=0.1)
    assert device.is_silent(3600)


def test_a_step_that_only_frees_rows_teaches_nothing() -> None:
    device = Device()
    device.watch.begin()
    device.watch.launched()
    device.watch.end()
    device.watch.done(0.0)
    assert device.step(load=2048, seconds=300)


def test_one_stall_is_forgotten_by_and_by() -> None:
    times = StepTimes()
    times.observe(1, 100.0)
    assert times.expect(1) == pytest.approx(300)
    for _ in range(500):
        times.observe(1, 0.1)
    assert times.expect(1) == pytest.approx(0.3)
