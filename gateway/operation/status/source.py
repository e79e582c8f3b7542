"""The status of all services, queried once for all clients of this gateway, and only if there are any."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from msgspec import UNSET

from pagewire import __version__
from pagewire.gateway.core.app_state import AppState
from pagewire.gateway.models.line import ModelLine
from pagewire.gateway.models.models import Models
from pagewire.gateway.operation.status.bodies import (
    Latency,
    LineStatus,
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
from pagewire.v1 import admin_pb2, lines_pb2
from pagewire.v1.admin_pb2 import ServiceState, ServiceStatus
from pagewire.wire.addresses import without_directories
from pagewire.wire.admin import each_once, own_status, status_behind

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
    def __init__(self, models: Models, why_not_ready: Callable[[], Awaitable[str]]) -> None:
        self._models = models
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
        await self._models.learn_names()
        request = admin_pb2.GetStatusRequest(with_kv_maps=True)
        asked = [(name, one) for name, neighbours in self._models.services() for one in neighbours]
        reason, found = await asyncio.gather(
            self._why_not_ready(), asyncio.gather(*(status_behind(one, request) for _, one in asked))
        )
        by_model: dict[str, list[list[ServiceStatus]]] = {}
        for (name, _), services in zip(asked, found, strict=True):
            by_model.setdefault(name, []).append(services)
        behind = [(name, one) for name, parts in by_model.items() for one in each_once(parts)]
        status = to_status([("", own_status("gateway", is_serving=not reason)), *behind], reason)
        status.models = [_line(line) for line in self._models.lines]
        status.memory_bytes = 0 if self._models.stack is None else self._models.stack.told.memory_bytes
        return status


STATUS = AppState[StatusSource]("status")


def to_status(found: Sequence[tuple[str, ServiceStatus]], reason: str) -> Status:
    """Returns the status.

    found: the services, those of the default model first, each with the name of its model.
    reason: why requests cannot be served; "" if they can.
    """
    services = [one for _, one in found]
    tokenizers = [one.tokenizer for one in services if one.HasField("tokenizer")]
    schedulers = [one.scheduler for one in services if one.HasField("scheduler")]
    ranks = {(model, one.address): one.executor.ranks for model, one in found if one.HasField("executor")}
    return Status(
        object="status",
        time=time.time(),
        version=__version__,
        ready=not reason,
        reason=reason,
        num_gateways=max(
            (one.num_clients for one in tokenizers), default=0
        ),  # each gateway has a stream to each tokenizer service
        services=[_health(one, model) for model, one in found],
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
        sleep=_sleep(_schedulers_of_first(found)),
        models=[],
        memory_bytes=0,
        replicas=[
            _replica(one, model, ranks.get((model, one.address), ()))
            for model, service in found
            if service.HasField("scheduler")
            for one in service.scheduler.replicas
        ],
    )


def _schedulers_of_first(found: Sequence[tuple[str, ServiceStatus]]) -> list[admin_pb2.ModelSleepStatus]:
    """Returns the sleep of each scheduler of the first model that has one."""
    schedulers = [(model, one.scheduler.sleep) for model, one in found if one.HasField("scheduler")]
    return [sleep for model, sleep in schedulers if model == schedulers[0][0]]


def _line(line: ModelLine) -> LineStatus:
    told = line.told or lines_pb2.Line()
    return LineStatus(
        model=line.first_name,
        state=line.state,
        problem=told.problem,
        progress=told.progress,
        pinned=told.pinned or line.told is None,
        sleeps_until_woken=told.sleeps_until_woken,
        memory_bytes=told.memory_bytes,
        memory_measured=told.memory_measured,
        loads=told.num_loads,
        rest_time=told.rest_time.ToNanoseconds() / 1e9 if told.HasField("rest_time") else None,
    )


def _sleep(found: Sequence[admin_pb2.ModelSleepStatus]) -> ModelSleep:
    """Returns the sleep of a model behind several schedulers, which sleeps only if all say so."""
    least = min(found, key=lambda one: one.level, default=admin_pb2.ModelSleepStatus())
    problem = next((one.problem for one in found if one.problem), "")
    return ModelSleep(level=least.level, wakes_on_request=least.wakes_on_request, problem=problem)


def _health(one: ServiceStatus, model: str) -> ServiceHealth:
    return ServiceHealth(
        service=one.service,  # type: ignore[arg-type]
        state=_STATES.get(one.state, "not_serving"),  # type: ignore[arg-type]
        address=without_directories(one.address),
        detail=without_directories(one.detail),
        pid=one.pid,
        uptime_seconds=round(one.uptime_seconds, 1),
        model=model,
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


def _replica(one: admin_pb2.ReplicaStatus, model: str, ranks: Iterable[admin_pb2.RankStatus]) -> ReplicaState:
    return ReplicaState(
        address=without_directories(one.address),
        model=model,
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
