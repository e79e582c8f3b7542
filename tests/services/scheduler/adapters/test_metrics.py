"""The metrics of adapters."""

from pagewire.services.scheduler.adapters.metrics import MAX_NAMED, AdapterMetrics


class State:
    num_slots = 4
    running_names = ("b", "a")
    waiting_names = ("c",)


def samples(metrics: AdapterMetrics) -> dict[str, list[tuple[dict[str, str], float]]]:
    return {family.name: [(sample.labels, sample.value) for sample in family.samples] for family in metrics.collect()}


def test_the_adapters_of_requests_are_labels() -> None:
    metrics = AdapterMetrics()
    assert not samples(metrics)
    metrics.source = State()
    ((labels, value),) = samples(metrics)["pagewire:lora_requests_info"]
    assert labels == {"max_lora": "4", "running_lora_adapters": "a,b", "waiting_lora_adapters": "c"}
    assert value > 1e9


def test_the_number_of_series_is_bounded() -> None:
    metrics = AdapterMetrics()
    metrics.source = State()
    for number in range(3 * MAX_NAMED):
        metrics.on_request(f"x{number}")
        metrics.on_request("x0")
    found = {labels["adapter"]: value for labels, value in samples(metrics)["pagewire:adapter_requests"]}
    assert len(found) == MAX_NAMED + 1
    assert (found["x0"], found["other"]) == (3 * MAX_NAMED + 1, 2 * MAX_NAMED)
