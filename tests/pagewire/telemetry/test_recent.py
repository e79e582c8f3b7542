"""Statistics of the most recent events."""

from pagewire.telemetry.recent import LATENCY_S, MAX_LATENCIES, RATE_S, Latencies, Rate


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_rate_is_of_the_last_whole_seconds() -> None:
    clock = Clock()
    rate = Rate(clock)
    for _ in range(20):
        rate.add(10)
        rate.add(20)
        clock.now += 1
    assert rate.per_second == 30
    clock.now += 2
    assert rate.per_second == 30 * (RATE_S - 2) / RATE_S
    clock.now += 1e6
    assert rate.per_second == 0 and rate.total == 600
    rate.add(50)
    clock.now += 1
    assert rate.per_second == 50 / RATE_S


def test_latencies_are_those_of_the_last_half_minute() -> None:
    latencies = Latencies()
    assert latencies.to_message(0).count == 0
    for i in range(100):
        latencies.observe(now=float(i), seconds=i / 100)
    recent = latencies.to_message(now=99.0)
    assert recent.count == LATENCY_S + 1
    assert recent.p50_seconds == 0.84 and recent.p95_seconds == 0.98
    assert latencies.to_message(now=1000.0).count == 0


def test_latencies_are_bounded() -> None:
    latencies = Latencies()
    for i in range(2 * MAX_LATENCIES):
        latencies.observe(now=0.0, seconds=float(i))
    assert latencies.to_message(now=0.0).count == MAX_LATENCIES
