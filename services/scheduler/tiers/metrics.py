"""Metrics of loads, as the scheduler decides them. Executors count the bytes and blocks that they copy."""

from prometheus_client import Counter

from pagewire.telemetry.loop_histogram import LoopHistogram
from pagewire.telemetry.metrics import LATENCY_BUCKETS
from pagewire.v1.executor_pb2 import KVLoaded

QUERIES = Counter(
    "pagewire:external_prefix_cache_queries",
    "Tokens looked up in tiers and other executors, after those found in the prefix cache",
)
HITS = Counter("pagewire:external_prefix_cache_hits", "Tokens with KV that was loaded from there instead of computed")
_LOADS = Counter(
    "pagewire:kv_tier_loads",
    "Loads of KV blocks that ended: whole, partial (some blocks were not found) or empty (none was)",
    ["outcome"],
)
LOAD_SECONDS = LoopHistogram(
    "pagewire:kv_tier_load_seconds", "Seconds from the start of a load to its end", LATENCY_BUCKETS
)
LEFT = Counter(
    "pagewire:kv_tier_loads_left",
    "Prefixes that could have been loaded, but were computed: slow (computing is faster by what was measured) or late "
    "(the load took longer than computing)",
    ["cause"],
)
TOO_SLOW, TOO_LATE = LEFT.labels("slow"), LEFT.labels("late")
_OUTCOMES = {outcome: _LOADS.labels(outcome) for outcome in ("whole", "partial", "empty")}


def on_loaded(loaded: KVLoaded, num_wanted: int) -> None:
    """Counts a load of `num_wanted` blocks that ended."""
    num_missing = len(loaded.missing)
    _OUTCOMES["whole" if not num_missing else "partial" if num_missing < num_wanted else "empty"].inc()
    LOAD_SECONDS.observe(loaded.seconds)
