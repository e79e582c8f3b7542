"""The periodic log line with the load of each executor, left out while nothing happens."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from pagewire.services.scheduler.core.replica import Replica
from pagewire.services.scheduler.core.scheduler import Scheduler

logger = logging.getLogger(__name__)

PERIOD_S = 10.0
# The most executors that a line names; with more, it has totals and ranges.
_MAX_NAMED = 8


@dataclass(frozen=True, slots=True)
class _Counts:
    """The totals of a replica since its start."""

    generated: int = 0
    queries: int = 0
    hits: int = 0
    preemptions: int = 0

    @classmethod
    def of(cls, replica: Replica) -> "_Counts":
        of = replica.counts
        return cls(of.num_generation_tokens, of.num_prefix_queries, of.num_prefix_hits, of.num_preemptions)

    def since(self, before: "_Counts") -> "_Counts":
        return _Counts(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


_NOTHING = _Counts()


class LoadLine:
    """The load since the last line."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._before: dict[Replica, _Counts] = {}

    def text(self, seconds: float) -> str:
        """Returns the next line, or "" if no request ran or waited. seconds: the time since the last line."""
        replicas = [replica for replica in self._scheduler.replicas if replica.info]
        counts = {replica: _Counts.of(replica) for replica in replicas}
        done = {replica: counts[replica].since(self._before.get(replica, _NOTHING)) for replica in replicas}
        self._before = counts
        waiting = self._scheduler.num_waiting
        if not waiting and not any(replica.num_running or done[replica] != _NOTHING for replica in replicas):
            return ""
        parts = [_total(replicas, list(done.values()), seconds)] if len(replicas) > _MAX_NAMED else []
        parts = parts or [f"{replica.name}: {_described(replica, done[replica], seconds)}" for replica in replicas]
        return "; ".join([*parts, f"{waiting} waiting"])


def _described(replica: Replica, done: _Counts, seconds: float) -> str:
    return (
        f"{replica.num_running} running, {done.generated / seconds:.1f} tokens/s, KV cache {replica.kv.usage:.0%}"
        f"{_hits(done)}{_preemptions(done.preemptions, replica.counts.num_preemptions)}"
    )


def _preemptions(num_new: int, num_all: int) -> str:
    """Returns the preemptions since the start, and those since the last line."""
    if not num_all:
        return ""
    return f", {num_all} preemptions" + (f" ({num_new} new)" if num_new else "")


def _hits(done: _Counts) -> str:
    return f", prefix hits {done.hits / done.queries:.0%}" if done.queries else ""


def _total(replicas: Sequence[Replica], done: Sequence[_Counts], seconds: float) -> str:
    running = [replica.num_running for replica in replicas]
    usage = [replica.kv.usage for replica in replicas]
    total = _Counts(*map(sum, zip(*map(astuple, done), strict=True)))
    num_preemptions = sum(replica.counts.num_preemptions for replica in replicas)
    return (
        f"{len(replicas)} executors: {sum(running)} running ({min(running)} to {max(running)} on each), "
        f"{total.generated / seconds:.1f} tokens/s, KV cache {min(usage):.0%} to {max(usage):.0%}{_hits(total)}"
        f"{_preemptions(total.preemptions, num_preemptions)}"
    )


async def log_load(scheduler: Scheduler, period: float = PERIOD_S) -> None:
    """Logs the load every `period` seconds until cancelled."""
    line = LoadLine(scheduler)
    while True:
        await asyncio.sleep(period)
        if text := line.text(period):
            logger.info("%s", text)
