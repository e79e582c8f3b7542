"""Metrics of saves and loads, as the scheduler orders them. Executors count what they copy."""

from prometheus_client import Counter

from pagewire.telemetry.loop_histogram import LoopHistogram
from pagewire.telemetry.metrics import LATENCY_BUCKETS
from pagewire.v1.executor_pb2 import KVLoaded, KVTierKind

LOADS = Counter(
    "pagewire:kv_tier_loads",
    "Loads of saved KV blocks: whole, partial (some blocks were not found) or empty (none was)",
    ["outcome"],
)
LOADED_BLOCKS = Counter("pagewire:kv_tier_loaded_blocks", "KV blocks that were loaded from a tier instead of computed")
MISSING_BLOCKS = Counter("pagewire:kv_tier_missing_blocks", "KV blocks that a load was to find in a tier, but did not")
LOADED_BYTES = Counter("pagewire:kv_tier_loaded_bytes", "Bytes of the KV blocks that were loaded, by tier", ["tier"])
LOAD_SECONDS = LoopHistogram("pagewire:kv_tier_load_seconds", "Seconds that a load took", LATENCY_BUCKETS)
SAVES = Counter("pagewire:kv_tier_ordered_saves", "KV blocks that steps named to be saved")

_OUTCOMES = {outcome: LOADS.labels(outcome) for outcome in ("whole", "partial", "empty")}
_BYTES = {
    KVTierKind.KV_TIER_KIND_HOST: LOADED_BYTES.labels("host"),
    KVTierKind.KV_TIER_KIND_DISK: LOADED_BYTES.labels("disk"),
}


def on_loaded(loaded: KVLoaded, num_wanted: int) -> None:
    """Counts a load of `num_wanted` blocks that ended."""
    num_missing = len(loaded.missing)
    _OUTCOMES["whole" if not num_missing else "partial" if num_missing < num_wanted else "empty"].inc()
    LOADED_BLOCKS.inc(num_wanted - num_missing)
    MISSING_BLOCKS.inc(num_missing)
    LOAD_SECONDS.observe(loaded.seconds)
    for one in loaded.bytes:
        if one.kind in _BYTES:
            _BYTES[one.kind].inc(one.bytes)
