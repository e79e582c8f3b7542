"""Flags of the scheduler."""

from dataclasses import dataclass

from pagewire.config.fields import NOT_NEGATIVE, POSITIVE, SECONDS, Range, flag
from pagewire.config.shared import BatchConfig, PublicListenConfig, RecoveryConfig, SeedConfig


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(BatchConfig, RecoveryConfig, SeedConfig, PublicListenConfig):
    """Batches requests continuously over paged KV memory."""

    listen: str = flag(
        "0.0.0.0:50052",
        "addresses to serve gRPC on, separated by commas: unix:/path or host:port",
        group="network",
    )
    executor_address: str = flag(
        "localhost:50053", "the executor services, separated by commas, one for each replica", group="network"
    )
    executor_discovery: str = flag(
        "static",
        "how executors are found from --executor-address; static: at these addresses, dns: at all addresses of these "
        "names, resolved every second, kubernetes: in the ready pods of these services, NAME:PORT or "
        "LABEL=VALUE:PORT, file: at the addresses in this file, one a line, which is followed",
        group="network",
        choices=("static", "dns", "kubernetes", "file"),
    )
    target_itl_ms: float | None = flag(
        None,
        "longest time between two tokens of a request while steps also compute prompts, in milliseconds; 0: no limit "
        "(default: 50, or twice the time of a step without prompts; longer in bursts of short prompts)",
        group="scheduling",
        valid=Range(minimum=0, maximum=3_600_000),
    )
    max_num_partial_prefills: int = flag(
        4, "maximum number of prompts that are computed in pieces at the same time", group="scheduling", valid=POSITIVE
    )
    max_long_partial_prefills: int = flag(
        1,
        "maximum number of long prompts among these; shorter prompts overtake waiting long ones",
        group="scheduling",
        valid=POSITIVE,
    )
    long_prefill_token_threshold: int = flag(
        0,
        "a prompt with more tokens to compute is long, and gets at most this many in one step while others run; 0: no "
        "such limit, and a prompt is long from a quarter of --max-num-batched-tokens on",
        group="scheduling",
        kind="size",
        valid=NOT_NEGATIVE,
    )
    max_running_per_tenant: int | None = flag(
        None,
        "maximum number of requests of one tenant that run at once (default: unlimited)",
        group="scheduling",
        valid=POSITIVE,
    )
    enable_prefix_caching: bool = flag(
        True, "reuse the KV blocks of prompts with the same beginning", group="scheduling"
    )
    prefix_cache_sharing: str = flag(
        "tenant",
        "which requests share cached blocks; tenant: those of the same tenant, all: all, but tenants can then infer "
        "each other's prompts from response times",
        group="scheduling",
        choices=("tenant", "all"),
    )
    enable_chunked_prefill: bool = flag(True, "divide long prompts among several steps", group="scheduling")
    scheduling_policy: str = flag(
        "fcfs",
        "order of waiting requests and of preemption",
        group="scheduling",
        choices=("fcfs", "priority"),
    )
    max_waiting_requests: int = flag(
        4096,
        "maximum number of requests that may wait; further ones are refused with RESOURCE_EXHAUSTED / 429",
        group="scheduling",
        valid=NOT_NEGATIVE,
    )
    max_queue_time: float = flag(
        30.0,
        "longest expected wait of a request before its prompt is computed, in seconds; beyond, it is refused at once "
        "with RESOURCE_EXHAUSTED / 429 and a time to retry; 0: no limit",
        group="scheduling",
        valid=SECONDS,
    )
    idle_timeout: float = flag(
        0.0,
        "seconds without a request after which the model falls asleep and gives its memory back; the next request "
        "wakes it; 0: never",
        group="scheduling",
        valid=SECONDS,
    )
    disable_log_stats: bool = flag(False, "leave out the line about the load every ten seconds", group="observability")
    kv_events_config: str | None = flag(
        None,
        "publish which blocks the prefix cache holds, in vLLM's protocol (docs/scale.md): a JSON object with "
        "enable_kv_cache_events, publisher (zmq or null), endpoint, replay_endpoint, buffer_steps, hwm and topic; it "
        "has no keys, so without an endpoint it is on loopback",
        group="observability",
        kind="json",
    )
    placement: str = flag(
        "cache_aware",
        "how an executor is chosen for a request; cache_aware: least time for all requests, with cached prefixes, "
        "least_load: fewest running requests, round_robin: in turns",
        group="scheduling",
        choices=("cache_aware", "least_load", "round_robin"),
    )
    pipeline_depth: int = flag(
        2,
        "steps in flight, 1 or 2; a pipeline of S stages adds S - 1",
        group="scheduling",
        valid=Range(minimum=1, maximum=2),
    )
