"""Metrics of adapters."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from pagewire.telemetry.metrics import LATENCY_BUCKETS

ADAPTERS = Gauge("pagewire:executor_adapters", "Adapters in host memory")
ADAPTER_HOST_BYTES = Gauge("pagewire:executor_adapter_host_bytes", "Bytes of the adapters in host memory")
ADAPTER_SLOT_BYTES = Gauge(
    "pagewire:executor_adapter_slot_bytes", "Bytes of the device for adapters: --max-loras of --max-lora-rank"
)
ADAPTER_SLOT_LOADS = Counter("pagewire:executor_adapter_slot_loads", "Adapters copied to a slot of the device")
ADAPTER_LOAD_SECONDS = Histogram(
    "pagewire:executor_adapter_load_seconds",
    "Time to read an adapter into host memory, while steps go on",
    buckets=LATENCY_BUCKETS,
)
