"""Series of tenants: few, and never falling."""

from pagewire.services.scheduler.observed.tenant_stats import MAX_NAMED, PERIOD_S, TenantStats
from pagewire.telemetry.tenant_metrics import of_tenant
from pagewire.v1.admin_pb2 import ServiceMetrics


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def generated(stats: TenantStats) -> dict[str, float]:
    [family] = [one for one in stats.collect() if one.name == "pagewire:tenant_generation_tokens"]
    return {sample.labels["tenant"]: sample.value for sample in family.samples}


def test_the_first_have_series_and_the_rest_one() -> None:
    stats = TenantStats(Clock())
    for number in range(MAX_NAMED + 5):
        stats.on_end(f"t{number}", 10)
    stats.on_end("other", 1)
    values = generated(stats)
    assert len(values) == MAX_NAMED + 1
    assert values["t0"] == 10 and values["other"] == 51


def test_the_tenant_that_uses_most_takes_the_series_of_the_one_that_uses_least() -> None:
    clock = Clock()
    stats = TenantStats(clock)
    for number in range(MAX_NAMED):
        stats.on_end(f"t{number}", 10 + number)
    stats.on_end("heavy", 10_000)
    before = generated(stats)
    assert "heavy" not in before
    clock.now += PERIOD_S
    stats.on_end("heavy", 7)
    stats.on_end("t0", 5)
    after = generated(stats)
    assert after["heavy"] == 7, "what it used before stays with the others"
    assert "t0" not in after and after["other"] == before["other"] + 5
    assert all(after[name] >= before[name] for name in before.keys() & after.keys())


def test_no_tenant_loses_its_series_while_there_is_room() -> None:
    clock = Clock()
    stats = TenantStats(clock)
    stats.on_end("a", 1)
    clock.now += PERIOD_S
    stats.on_end("b", 1)
    clock.now += PERIOD_S
    stats.on_end("b", 1)
    assert generated(stats) == {"a": 1, "b": 2, "other": 0}


def test_requests_that_name_no_tenant_have_a_label() -> None:
    stats = TenantStats()
    stats.on_end("", 3)
    [family] = [one for one in stats.collect() if one.name == "pagewire:tenant_generation_tokens"]
    values = {sample.labels["tenant"]: sample.value for sample in family.samples}
    assert values == {"none": 3, "other": 0}
    exposition = "\n".join(f'{one.name}{{tenant="{one.labels["tenant"]}"}} {one.value}' for one in family.samples)
    [seen] = of_tenant([ServiceMetrics(service="scheduler", exposition=exposition)], "")
    assert seen.exposition == 'pagewire:tenant_generation_tokens_total{tenant="none"} 3'
