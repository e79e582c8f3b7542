"""The status of all services, queried once for all clients of this gateway, and only if there are any."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from msgspec import UNSET

from pagewire import __version__
from pagewire.gateway.core.app_state import AppState
from pagewire.gateway.operation.status.bodies import (
    Latency,
    ModelSleep,
    PageGroup,
    PageMap,
    PrefixCache,
    RankState,
    RecentLatencies,
    ReplicaState,
    RequestCounts,
    ServiceHealth,
    Status,
    Throughput,
)
from pagewire.v1 import admin_pb2
from pagewire.v1.admin_pb2 import ServiceState, ServiceStatus
from pagewire.wire.addresses import without_directories
from pagewire.wire.admin import Neighbour, each_once, own_status, status_behind

_STATES = {
    ServiceState.SERVICE_STATE_SERVING: "serving",
    ServiceState.SERVICE_STATE_NOT_SERVING: "not_serving",
    ServiceState.SERVICE_STATE_UNREACHABLE: "unreachable",
}
_RANK_STATES = {
    admin_pb2.RankState.RANK_STATE_STARTING: "starting",
    admin_pb2.RankState.RANK_STATE_READY: "ready",
    admin_pb2.RankState.RANK_STATE_LOST: "lost",
}


class StatusSource:
    def __init__(
        self, tokenizers: Callable[[], Sequence[Neighbour]], why_not_ready: Callable[[], Awaitable[str]]
    ) -> None:
        self._tokenizers = tokenizers
        self._why_not_ready = why_not_ready
        self._lock = asyncio.Lock()
        self._latest: Status | None = None
        self._asked = 0.0

    async def status(self, max_age: float) -> Status:
        """Returns a status that is at most max_age seconds old. It is shared, so it must not be changed."""
        async with self._lock:
            if self._latest is None or time.monotonic() - self._asked > max_age:
                self._asked = time.monotonic()
                self._latest = await self._ask()
            return self._latest

    async def _ask(self) -> Status:
        request = admin_pb2.GetStatusRequest(with_kv_maps=True)
        reason, behind = await asyncio.gather(
            self._why_not_ready(), asyncio.gather(*(status_behind(one, request) for one in self._tokenizers()))
        )
        return to_status([own_status("gateway", is_serving=not reason), *each_once(behind)], reason)


STATUS = AppState[StatusSource]("status")


def to_status(services: Sequence[ServiceStatus], reason: str) -> Status:
    """Returns the status. reason: why requests cannot be served; "" if they can."""
    tokenizers = [one.tokenizer for one in services if one.HasField("tokenizer")]
    schedulers = [one.scheduler for one in services if one.HasField("scheduler")]
    ranks = {one.address: one.executor.ranks for one in services if one.HasField("executor")}
    return Status(
        object="status",
        time=time.time(),
        version=__version__,
        ready=not reason,
        reason=reason,
        num_gateways=max(
            (one.num_clients for one in tokenizers), default=0
        ),  # each gateway has a stream to each tokenizer service
        services=[_health(one) for one in services],
        requests=RequestCounts(
            running=sum(one.num_running for one in schedulers), waiting=sum(one.num_waiting for one in schedulers)
        ),
        throughput=Throughput(
            generation_tokens_per_second=sum(one.generation_tokens_per_second for one in schedulers),
            prompt_tokens_per_second=sum(one.prompt_tokens_per_second for one in schedulers),
            generation_tokens=sum(one.num_generation_tokens for one in schedulers),
            prompt_tokens=sum(one.num_prompt_tokens for one in schedulers),
        ),
        latency=Latency(
            time_to_first_token=_latencies([one.time_to_first_token for one in tokenizers]),
            inter_token=_latencies([one.inter_token_latency for one in tokenizers]),
        ),
        prefix_cache=PrefixCache(
            queries=sum(one.num_prefix_queries for one in schedulers),
            hits=sum(one.num_prefix_hits for one in schedulers),
        ),
        preemptions=sum(one.num_preemptions for one in schedulers),
        sleep=_sleep([one.sleep for one in schedulers]),
        replicas=[_replica(one, ranks.get(one.address, ())) for scheduler in schedulers for one in scheduler.replicas],
    )


def _sleep(found: Sequence[admin_pb2.ModelSleepStatus]) -> ModelSleep:
    """Returns the sleep of a model behind several schedulers, which sleeps only if all say so."""
    least = min(found, key=lambda one: one.level, default=admin_pb2.ModelSleepStatus())
    problem = next((one.problem for one in found if one.problem), "")
    return ModelSleep(level=least.level, wakes_on_request=least.wakes_on_request, problem=problem)


def _health(one: ServiceStatus) -> ServiceHealth:
    return ServiceHealth(
        service=one.service,  # type: ignore[arg-type]
        state=_STATES.get(one.state, "not_serving"),  # type: ignore[arg-type]
        address=without_directories(one.address),
        detail=without_directories(one.detail),
        pid=one.pid,
        uptime_seconds=round(one.uptime_seconds, 1),
        cpus=one.cpus,
    )


def _latencies(recent: Sequence[admin_pb2.RecentLatency]) -> RecentLatencies:
    """Merges the percentiles of several services: the mean of the medians, and the highest 95th percentile."""
    recent = [one for one in recent if one.count]
    if not recent:
        return RecentLatencies(count=0, p50=None, p95=None)
    count = sum(one.count for one in recent)
    median = sum(one.p50_seconds * one.count for one in recent) / count
    return RecentLatencies(count=count, p50=median, p95=max(one.p95_seconds for one in recent))


def _replica(one: admin_pb2.ReplicaStatus, ranks: Iterable[admin_pb2.RankStatus]) -> ReplicaState:
    return ReplicaState(
        address=without_directories(one.address),
        attached=one.is_attached,
        running=one.num_running,
        max_num_seqs=one.max_num_seqs,
        weights_version=one.weights_version,
        replacing_weights=one.is_replacing_weights,
        name=one.name,
        role=one.role,
        leaving=one.is_leaving,
        prefix_cache=PrefixCache(queries=one.num_prefix_queries, hits=one.num_prefix_hits),
        generation_tokens=one.num_generation_tokens,
        ranks=[_rank(rank) for rank in ranks],
        groups=[_group(group) for group in one.kv_groups],
    )


def _rank(one: admin_pb2.RankStatus) -> RankState:
    return RankState(
        rank=one.rank,
        stage=one.stage,
        state=_RANK_STATES.get(one.state, "starting"),  # type: ignore[arg-type]
        wait_seconds=round(one.wait_seconds, 3) if one.HasField("wait_seconds") else None,
        process=one.process,
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
