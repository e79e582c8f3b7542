"""Metrics of the tiers of KV memory."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_SIZES = (2**14, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26, 2**28, 2**30)

HELD_BYTES = Gauge("pagewire:kv_tier_bytes", "Bytes of blocks that a tier holds", ["tier"])
HIT_BLOCKS = Counter("pagewire:kv_tier_hit_blocks", "Blocks that were loaded from a tier", ["tier"])
MISSED_BLOCKS = Counter(
    "pagewire:kv_tier_missed_blocks",
    "Blocks that were to be loaded and were computed instead, by cause: gone, damaged, unreadable, disk_slow, late, "
    "source (of another executor)",
    ["cause"],
)
_STORES_SKIPPED = Counter(
    "pagewire:kv_offload_stores_skipped",
    "Blocks that were not stored, by cause: no_room (in host memory), disk_slow, disk_full, disk_read_only, "
    "disk_unwritable, disk_failed (shortly after one of these)",
    ["cause"],
)
_STORE_BYTES = Counter("pagewire:kv_offload_store_bytes", "Bytes that were stored in a tier", ["tier"])
_STORE_TIME = Counter("pagewire:kv_offload_store_time", "Time of storing blocks in a tier, seconds", ["tier"])
_LOAD_BYTES = Counter("pagewire:kv_offload_load_bytes", "Bytes that were loaded from a tier", ["tier"])
_LOAD_TIME = Counter("pagewire:kv_offload_load_time", "Time from the start of loads to their end, seconds")
_LOAD_SIZE = Histogram("pagewire:kv_offload_load_size", "Bytes of a load", buckets=_SIZES)


def skipped(cause: str) -> None:
    """Counts a block that was not stored."""
    _STORES_SKIPPED.labels(cause).inc()


def stored(tier: str, num_bytes: int, seconds: float) -> None:
    """Counts a block that was stored."""
    _STORE_BYTES.labels(tier).inc(num_bytes)
    _STORE_TIME.labels(tier).inc(seconds)


def failed_load(cause: str, num_blocks: int = 1) -> None:
    """Counts blocks that were not loaded."""
    MISSED_BLOCKS.labels(cause).inc(num_blocks)


def hit(tier: str, num_bytes: int) -> None:
    """Counts a block that was loaded."""
    HIT_BLOCKS.labels(tier).inc()
    _LOAD_BYTES.labels(tier).inc(num_bytes)


def loaded(num_bytes: int, seconds: float) -> None:
    """Counts a load that ended."""
    _LOAD_TIME.inc(seconds)
    _LOAD_SIZE.observe(num_bytes)
