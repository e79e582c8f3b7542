"""Metrics of this process: the buckets that services share, and the exposition of all metrics.

Metrics are prometheus_client's, on its default registry.
"""

import asyncio
import logging
from collections.abc import Iterable
from typing import Protocol

from prometheus_client import REGISTRY, Gauge, Metric, disable_created_metrics, start_http_server
from prometheus_client.openmetrics.exposition import ALLOWUTF8, generate_latest

from pagewire.config import ListenConfig
from pagewire.errors import StartupError

logger = logging.getLogger(__name__)

# Seconds. Fine below 100 ms, where inter-token latencies live; coarse up to minutes.
LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip

# OpenTelemetry's conventions for GenAI: buckets of durations in seconds, and the labels of every metric.
GENAI_DURATION_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
GENAI_LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "gen_ai_response_model")
# Tokens of a prompt, an output or a step.
TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 1048576)

# Creation times would double the number of series; the start times of the processes say the same.
disable_created_metrics()

ASYNCIO_TASKS = Gauge(
    "pagewire:asyncio_tasks", "Tasks alive on the service's event loop; grows only with live requests"
)


class Collectable(Protocol):
    def collect(self) -> Iterable[Metric]: ...


def openmetrics(registry: Collectable) -> bytes:
    """Returns the metrics as OpenMetrics text 1.0.0. Names keep their colons, which the library replaces by default."""
    return generate_latest(registry, ALLOWUTF8)


def exposition() -> str:
    """Returns this process's metrics as OpenMetrics text. Call it on the event loop: it counts its tasks."""
    ASYNCIO_TASKS.set(len(asyncio.all_tasks()))
    return openmetrics(REGISTRY).decode()


def serve_metrics(config: ListenConfig) -> None:
    """Serves this process's metrics over HTTP in a separate thread, if --metrics-port is set.

    Raises StartupError if the port cannot be bound.
    """
    if config.metrics_port is None:
        return
    try:
        start_http_server(config.metrics_port, config.admin_host)
    except OSError as error:
        raise StartupError(
            f"--metrics-port: cannot listen on {config.admin_host}:{config.metrics_port} ({error.strerror or error}):"
            " stop the process that uses it, or choose another with --metrics-port and --admin-host"
        ) from error
    logger.info("metrics on http://%s:%d/metrics", config.admin_host, config.metrics_port)
