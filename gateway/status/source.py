"""Asks the line for its status, once for all who watch by this gateway, and only while somebody does."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from msgspec import UNSET

from pagewire import __version__
from pagewire.admin import Neighbour, own_status, status_behind
from pagewire.gateway.status.schema import (
    Latency,
    PageGroup,
    PageMap,
    PrefixCache,
    RecentLatencies,
    ReplicaState,
    RequestCounts,
    ServiceHealth,
    Status,
    Throughput,
)
from pagewire.v1 import admin_pb2
from pagewire.v1.admin_pb2 import ServiceState, ServiceStatus

_STATES = {
    ServiceState.SERVICE_STATE_SERVING: "serving",
    ServiceState.SERVICE_STATE_NOT_SERVING: "not_serving",
    ServiceState.SERVICE_STATE_UNREACHABLE: "unreachable",
}


class StatusSource:
    def __init__(self, tokenizer: Neighbour, why_not_ready: Callable[[], Awaitable[str]]) -> None:
        self._tokenizer = tokenizer
        self._why_not_ready = why_not_ready
        self._lock = asyncio.Lock()
        self._latest: Status | None = None
        self._asked = 0.0

    async def status(self, max_age: float) -> Status:
        """At most max_age seconds old. Not to be changed: others have it, too."""
        async with self._lock:
            if self._latest is None or time.monotonic() - self._asked > max_age:
                self._asked = time.monotonic()
                self._latest = await self._ask()
            return self._latest

    async def _ask(self) -> Status:
        request = admin_pb2.GetStatusRequest(with_kv_maps=True)
        reason, behind = await asyncio.gather(self._why_not_ready(), status_behind(self._tokenizer, request))
        return to_status([own_status("gateway", is_serving=not reason), *behind], reason)


def to_status(services: Sequence[ServiceStatus], reason: str) -> Status:
    """reason: why the line cannot serve; "" if it can."""
    empty = ServiceStatus()
    tokenizer = next((one for one in services if one.HasField("tokenizer")), empty).tokenizer
    scheduler = next((one for one in services if one.HasField("scheduler")), empty).scheduler
    return Status(
        object="status",
        time=time.time(),
        version=__version__,
        ready=not reason,
        reason=reason,
        num_gateways=tokenizer.num_clients,
        services=[_health(one) for one in services],
        requests=RequestCounts(running=scheduler.num_running, waiting=scheduler.num_waiting),
        throughput=Throughput(
            generation_tokens_per_second=scheduler.generation_tokens_per_second,
            prompt_tokens_per_second=scheduler.prompt_tokens_per_second,
            generation_tokens=scheduler.num_generation_tokens,
            prompt_tokens=scheduler.num_prompt_tokens,
        ),
        latency=Latency(
            time_to_first_token=_latencies(tokenizer.time_to_first_token),
            inter_token=_latencies(tokenizer.inter_token_latency),
        ),
        prefix_cache=PrefixCache(queries=scheduler.num_prefix_queries, hits=scheduler.num_prefix_hits),
        preemptions=scheduler.num_preemptions,
        replicas=[_replica(one) for one in scheduler.replicas],
    )


def _health(one: ServiceStatus) -> ServiceHealth:
    return ServiceHealth(
        service=one.service,  # type: ignore[arg-type]
        state=_STATES.get(one.state, "not_serving"),  # type: ignore[arg-type]
        address=one.address,
        detail=one.detail,
        pid=one.pid,
        uptime_seconds=round(one.uptime_seconds, 1),
    )


def _latencies(recent: admin_pb2.RecentLatency) -> RecentLatencies:
    if not recent.count:
        return RecentLatencies(count=0, p50=None, p95=None)
    return RecentLatencies(count=recent.count, p50=recent.p50_seconds, p95=recent.p95_seconds)


def _replica(one: admin_pb2.ReplicaStatus) -> ReplicaState:
    return ReplicaState(
        address=one.address,
        attached=one.is_attached,
        running=one.num_running,
        max_num_seqs=one.max_num_seqs,
        weights_version=one.weights_version,
        replacing_weights=one.is_replacing_weights,
        name=one.name,
        leaving=one.is_leaving,
        prefix_cache=PrefixCache(queries=one.num_prefix_queries, hits=one.num_prefix_hits),
        generation_tokens=one.num_generation_tokens,
        groups=[_group(group) for group in one.kv_groups],
    )


def _group(group: admin_pb2.KVGroupStatus) -> PageGroup:
    runs = [number for run in group.map for number in (run.state, run.num_cells)]
    return PageGroup(
        blocks=group.num_blocks,
        block_size=group.block_size,
        free=group.num_free,
        cached=group.num_cached,
        used=group.num_used,
        shared=group.num_shared,
        window=group.window,
        kind="state" if group.is_state else "kv",
        map=PageMap(blocks_per_cell=group.blocks_per_cell, runs=runs) if group.blocks_per_cell else UNSET,
    )
