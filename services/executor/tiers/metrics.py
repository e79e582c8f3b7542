"""Metrics of the tiers of KV memory."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_SIZES = (2**14, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26, 2**28, 2**30)

HELD_BYTES = Gauge("pagewire:kv_tier_bytes", "Bytes of blocks in a tier; disk: of all formats", ["tier"])
HOST_USAGE = Gauge("pagewire:kv_offload_cpu_cache_usage_perc", "Share of the host tier that holds blocks")
_HIT_BLOCKS = Counter(
    "pagewire:kv_tier_hit_blocks",
    "Blocks that were loaded instead of computed, by tier; the memory of another executor counts as host",
    ["tier"],
)
_MISSED_BLOCKS = Counter(
    "pagewire:kv_tier_missed_blocks",
    "Blocks that were to be loaded and are computed, by cause: gone, damaged, unreadable, disk_slow, late, source (of "
    "another executor)",
    ["cause"],
)
_STORES_SKIPPED = Counter(
    "pagewire:kv_offload_stores_skipped",
    "Blocks that were not stored, by cause: no_room (in host memory), disk_slow, disk_full, disk_read_only, "
    "disk_unwritable, disk_failed (shortly after one of these), late (its copy hung), fault (of this program)",
    ["cause"],
)
_NO_ROOM = Counter("pagewire:kv_offload_allocation_failure", "Blocks that found no room in host memory")
_STORE_BYTES = Counter("pagewire:kv_offload_store_bytes", "Bytes that were stored, by tier", ["tier"])
_STORE_TIME = Counter("pagewire:kv_offload_store_time", "Seconds in which blocks were stored, by tier", ["tier"])
_STORE_SIZE = Histogram("pagewire:kv_offload_store_size", "Bytes of a stored block", ["tier"], buckets=_SIZES)
_LOAD_BYTES = Counter("pagewire:kv_offload_load_bytes", "Bytes that were loaded, by tier", ["tier"])
_LOAD_TIME = Counter("pagewire:kv_offload_load_time", "Seconds from the start of each load to its end")
_LOAD_SIZE = Histogram("pagewire:kv_offload_load_size", "Bytes of a load of blocks", buckets=_SIZES)


def skipped(cause: str) -> None:
    """Counts a block that was not stored."""
    _STORES_SKIPPED.labels(cause).inc()
    if cause == "no_room":
        _NO_ROOM.inc()


def stored(tier: str, num_bytes: int, seconds: float) -> None:
    """Counts a block that was stored."""
    _STORE_BYTES.labels(tier).inc(num_bytes)
    _STORE_TIME.labels(tier).inc(seconds)
    _STORE_SIZE.labels(tier).observe(num_bytes)


def missed(cause: str, num_blocks: int = 1) -> None:
    """Counts blocks that were not loaded."""
    _MISSED_BLOCKS.labels(cause).inc(num_blocks)


def hit(tier: str, num_bytes: int) -> None:
    """Counts a block that was loaded."""
    _HIT_BLOCKS.labels(tier).inc()
    _LOAD_BYTES.labels(tier).inc(num_bytes)


def loaded(num_bytes: int, seconds: float) -> None:
    """Counts a load that ended."""
    _LOAD_TIME.inc(seconds)
    _LOAD_SIZE.observe(num_bytes)
