"""Metrics of events of the KV cache."""

from collections import Counter as Counts
from collections.abc import Sequence

from prometheus_client import Counter, Gauge

from pagewire.services.scheduler.kv_events.recorder import Change, Cleared, Removed, Stored

EVENTS = Counter(
    "pagewire:kv_events",
    "Changes of what the prefix cache holds, while they are recorded: stored and removed (blocks), cleared (executors)",
    ["kind"],
)
SUBSCRIBERS = Gauge("pagewire:kv_event_subscribers", "Subscribers of SubscribeKvEvents")
DROPPED = Counter("pagewire:kv_event_subscribers_dropped", "Subscribers that fell too far behind and were ended")

_KINDS = {Stored: EVENTS.labels("stored"), Removed: EVENTS.labels("removed"), Cleared: EVENTS.labels("cleared")}


def count(changes: Sequence[Change]) -> None:
    for kind, number in Counts(map(type, changes)).items():
        _KINDS[kind].inc(number)
