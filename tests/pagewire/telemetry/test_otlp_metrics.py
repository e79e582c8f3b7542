"""The times at which metrics are sent by OTLP."""

import pytest

from pagewire.errors import StartupError
from pagewire.telemetry import otlp_metrics


def test_the_interval_is_in_milliseconds() -> None:
    assert otlp_metrics._interval({}) == 60.0
    assert otlp_metrics._interval({"OTEL_METRIC_EXPORT_INTERVAL": "250"}) == 0.25


@pytest.mark.parametrize("text", ["abc", "0", "-5", "1.5", "nan"])
def test_an_interval_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(StartupError, match=f"OTEL_METRIC_EXPORT_INTERVAL={text}"):
        otlp_metrics._interval({"OTEL_METRIC_EXPORT_INTERVAL": text})
