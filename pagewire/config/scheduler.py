"""Flags of the scheduler."""

from dataclasses import dataclass

from pagewire.config.fields import NOT_NEGATIVE, POSITIVE, Range, flag
from pagewire.config.shared import BatchConfig, PublicListenConfig, RecoveryConfig


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(BatchConfig, RecoveryConfig, PublicListenConfig):
    """Continuous batching over paged KV memory."""

    listen: str = flag(
        "0.0.0.0:50052",
        "addresses to serve gRPC on, comma separated: unix:/path or host:port",
        group="network",
    )
    executor_address: str = flag(
        "localhost:50053", "the executor services, one per replica, comma separated", group="network"
    )
    executor_discovery: str = flag(
        "static",
        "how executors are found; static: where --executor-address says, dns: at all addresses that the names there "
        "have, asked for every second, kubernetes: as the ready pods of the services there, NAME:PORT or "
        "LABEL=VALUE:PORT, file: as the lines of the file there, whenever they change",
        group="network",
        choices=("static", "dns", "kubernetes", "file"),
    )
    target_itl_ms: float | None = flag(
        None,
        "longest time between two tokens of a request while prompts are computed beside it, milliseconds; 0 = no "
        "limit (default: 50, or twice what a step takes without prompts, longer in bursts of short prompts)",
        group="scheduling",
        valid=NOT_NEGATIVE,
    )
    max_num_partial_prefills: int = flag(
        4, "prompts that may be computed piece by piece at the same time", group="scheduling", valid=POSITIVE
    )
    max_long_partial_prefills: int = flag(
        1, "how many of these may be long; shorter ones overtake those that wait", group="scheduling", valid=POSITIVE
    )
    long_prefill_token_threshold: int = flag(
        0,
        "a prompt with more tokens to compute is long, and gets no more in one step while others run; 0 = no such "
        "limit, and a quarter of max-num-batched-tokens is long",
        group="scheduling",
        kind="size",
        valid=NOT_NEGATIVE,
    )
    max_running_per_tenant: int | None = flag(
        None, "requests of one tenant that may run at once (default: unlimited)", group="scheduling", valid=POSITIVE
    )
    enable_prefix_caching: bool = flag(True, "reuse the KV blocks of prompts that begin alike", group="scheduling")
    prefix_cache_sharing: str = flag(
        "tenant",
        "who finds whose blocks there: requests of the same tenant, or all, which then learn from the time of an "
        "answer what others have asked",
        group="scheduling",
        choices=("tenant", "all"),
    )
    enable_chunked_prefill: bool = flag(True, "split long prompts over several steps", group="scheduling")
    scheduling_policy: str = flag(
        "fcfs",
        "order of waiting requests and of preemption",
        group="scheduling",
        choices=("fcfs", "priority"),
    )
    max_waiting_requests: int = flag(
        4096,
        "requests that may wait; more are refused with RESOURCE_EXHAUSTED / 429",
        group="scheduling",
        valid=NOT_NEGATIVE,
    )
    max_queue_time: float = flag(
        30.0,
        "seconds that a request may have to wait for others before its prompt is computed; if it would be more, it is "
        "refused at once with RESOURCE_EXHAUSTED / 429 and the time to come back; 0 = no limit",
        group="scheduling",
        valid=NOT_NEGATIVE,
    )
    placement: str = flag(
        "cache_aware",
        "which executor takes a request: cache_aware = where it costs all requests the least time, found prefixes "
        "included; least_load = where the fewest run; round_robin = one after the other",
        group="scheduling",
        choices=("cache_aware", "least_load", "round_robin"),
    )
    pipeline_depth: int = flag(
        2,
        "steps in flight, 1 or 2; of a pipeline of S stages S - 1 more",
        group="scheduling",
        valid=Range(minimum=1, maximum=2),
    )
