"""The metrics of each service before its first request."""

import subprocess
import sys
from pathlib import Path

from pagewire.v1.admin_pb2 import ServiceMetrics

_EXPOSITION = """
import sys
from importlib import import_module
from pagewire.telemetry import metrics
metrics.ASYNCIO_TASKS.set(0)
for module in sys.argv[1:]:
    import_module(module)
from prometheus_client import REGISTRY
sys.stdout.write(metrics.openmetrics(REGISTRY).decode())
"""
_STATS = {
    "gateway": ["pagewire.gateway.core.metrics"],
    "tokenizer": ["pagewire.services.tokenizer.stats"],
    "scheduler": [
        "pagewire.services.scheduler.observed.stats",
        "pagewire.services.scheduler.observed.replica_stats",
        "pagewire.services.scheduler.tiers.metrics",
        "pagewire.services.scheduler.sleep.metrics",
    ],
    "executor": ["pagewire.services.executor.stats", "pagewire.services.executor.tiers.metrics"],
}


def fresh_expositions() -> list[ServiceMetrics]:
    """Each service in a process of its own, as names are its own."""
    processes = {
        service: subprocess.Popen(
            [sys.executable, "-c", _EXPOSITION, *modules],
            cwd=Path(__file__).parents[1],
            stdout=subprocess.PIPE,
            text=True,
        )
        for service, modules in _STATS.items()
    }
    return [
        ServiceMetrics(service=service, exposition=process.communicate(timeout=60)[0])
        for service, process in processes.items()
    ]
