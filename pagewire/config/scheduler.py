"""Flags of the scheduler."""

from dataclasses import dataclass

from pagewire.config.shared import BatchConfig, PublicListenConfig, RecoveryConfig
from pagewire.fields import NOT_NEGATIVE, Range, flag


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
    long_prefill_token_threshold: int = flag(
        0,
        "longest prefill chunk of one request while others run, tokens; 0 = no limit",
        group="scheduling",
        kind="size",
        valid=NOT_NEGATIVE,
    )
    enable_prefix_caching: bool = flag(True, "reuse the KV blocks of prompts that begin alike", group="scheduling")
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
    pipeline_depth: int = flag(2, "steps in flight, 1 or 2", group="scheduling", valid=Range(minimum=1, maximum=2))

    @property
    def executor_addresses(self) -> tuple[str, ...]:
        """Of each replica."""
        return tuple(address.strip() for address in self.executor_address.split(","))
