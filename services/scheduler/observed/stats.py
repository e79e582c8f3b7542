"""Prometheus metrics of the scheduler. Updated once per step or per request, never per token."""

from collections.abc import Mapping

from prometheus_client import Counter, Gauge

from pagewire.services.scheduler.core.replica import Replica
from pagewire.services.scheduler.core.scheduler import Scheduler
from pagewire.services.scheduler.observed.tenant_stats import TENANTS
from pagewire.services.scheduler.values.request import FinishReason, Request
from pagewire.services.scheduler.values.step import StepClock
from pagewire.telemetry.loop_histogram import LoopCounter, LoopHistogram
from pagewire.telemetry.metrics import LATENCY_BUCKETS, TOKEN_BUCKETS
from pagewire.telemetry.recent import Rate

_STEP_BUCKETS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)

NUM_RUNNING = Gauge("pagewire:num_requests_running", "Requests that hold a row and KV blocks")
NUM_WAITING = Gauge("pagewire:num_requests_waiting", "Requests that wait for a row or for KV blocks")
KV_CACHE_USAGE = Gauge(
    "pagewire:kv_cache_usage_perc",
    "Share of KV blocks in use, 0 to 1, of the fullest group of layers, averaged over the executors",
)
NUM_EXECUTORS = Gauge("pagewire:num_executors", "Executors that steps are sent to")
PREEMPTIONS = Counter("pagewire:num_preemptions", "Times a request lost its KV blocks to another one")
PREFIX_QUERIES = Counter("pagewire:prefix_cache_queries", "Tokens looked up in the prefix cache")
PREFIX_HITS = Counter("pagewire:prefix_cache_hits", "Tokens with KV found in the prefix cache")
PROMPT_TOKENS = Counter("pagewire:prompt_tokens", "Prompt tokens of admitted requests")
CACHED_PROMPT_TOKENS = Counter(
    "pagewire:prompt_tokens_cached", "Prompt tokens of admitted requests with KV in the prefix cache"
)
PROMPT_TOKENS_BY_SOURCE = Counter(
    "pagewire:prompt_tokens_by_source",
    "Prompt tokens of admitted requests: computed (local_compute) or found in the prefix cache (local_cache_hit)",
    ["source"],
)
GENERATION_TOKENS = LoopCounter("pagewire:generation_tokens", "Tokens generated")
REQUEST_SUCCESS = Counter("pagewire:request_success", "Requests that ended, by reason", ["finished_reason"])
REFUSALS = Counter(
    "pagewire:requests_refused",
    "Requests that were refused for lack of capacity: queue_full (--max-waiting-requests), queue_time "
    "(--max-queue-time) or deadline (it would pass before the first token)",
    ["reason"],
)
EXPIRED = Counter(
    "pagewire:requests_expired",
    "Requests that passed their deadline, by stage: waiting, prompt (being computed) or output (being generated)",
    ["stage"],
)
FORECAST_ERROR = LoopHistogram(
    "pagewire:time_to_first_token_forecast_error_seconds",
    "Seconds from a request's arrival to its first token less what was forecast",
    (-10.0, -3.0, -1.0, -0.3, -0.1, 0.0, 0.1, 0.3, 1.0, 3.0, 10.0),
)
CONDEMNED = Counter(
    "pagewire:requests_condemned",
    "Requests that ended because executors failed whenever they ran them, by the last failure: step (the executor "
    "survived), device, hang, exit (the process ended), silent (unknown)",
    ["cause"],
)
RECOVERIES = Counter("pagewire:recoveries", "Times an executor was lost")
WEIGHTS_REPLACED = Counter("pagewire:weights_replaced", "Times the weights of all executors were replaced")
STEPS = LoopCounter("pagewire:steps", "Steps sent to the executor")
LATE_STEPS = LoopCounter("pagewire:late_steps", "Steps decided too late, so that the device waited for them")
STEP_LEAD = Gauge(
    "pagewire:step_lead_seconds",
    "Seconds between the decision of a step and the expected end of the long step before it",
)
STEP_TOKENS = LoopHistogram("pagewire:iteration_tokens", "Tokens computed per step", TOKEN_BUCKETS)
SCHEDULE_TIME = LoopHistogram("pagewire:schedule_time_seconds", "Time to decide one step", _STEP_BUCKETS)
EXECUTE_TIME = LoopHistogram("pagewire:execute_time_seconds", "Device time of one step", LATENCY_BUCKETS)
EXECUTE_QUEUE_TIME = LoopHistogram(
    "pagewire:execute_queue_time_seconds", "Time a step waited in the executor's queue", LATENCY_BUCKETS
)
QUEUE_TIME = LoopHistogram(
    "pagewire:request_queue_time_seconds", "Seconds from a request's arrival to its first step", LATENCY_BUCKETS
)
PREFILL_TIME = LoopHistogram(
    "pagewire:request_prefill_time_seconds", "Seconds from a request's first step to its first token", LATENCY_BUCKETS
)
DECODE_TIME = LoopHistogram(
    "pagewire:request_decode_time_seconds", "Seconds from a request's first token to its end", LATENCY_BUCKETS
)
INFERENCE_TIME = LoopHistogram(
    "pagewire:request_inference_time_seconds", "Seconds from a request's first step to its end", LATENCY_BUCKETS
)
# Observed when a request ends for any reason.
REQUEST_PROMPT_TOKENS = LoopHistogram("pagewire:request_prompt_tokens", "Tokens of a request's prompt", TOKEN_BUCKETS)
REQUEST_COMPUTED_PROMPT_TOKENS = LoopHistogram(
    "pagewire:request_computed_prompt_tokens",
    "Tokens of a request's prompt without KV in the prefix cache",
    TOKEN_BUCKETS,
)
REQUEST_GENERATION_TOKENS = LoopHistogram(
    "pagewire:request_generation_tokens", "Tokens of a request's output", TOKEN_BUCKETS
)
REQUEST_MAX_TOKENS = LoopHistogram("pagewire:request_params_max_tokens", "The max_tokens of a request", TOKEN_BUCKETS)
REQUEST_PREEMPTIONS = LoopHistogram(
    "pagewire:request_num_preemptions", "Times that a request lost its KV blocks to others", (0, 1, 2, 3, 5, 10)
)
# An increase is invisible in a series that begins with it, so the series of alerts exist from the start.
for _counter, _values in (
    (REFUSALS, ("queue_full", "queue_time", "deadline")),
    (EXPIRED, ("waiting", "prompt", "output")),
    (CONDEMNED, ("step", "device", "hang", "exit", "silent")),
):
    for _value in _values:
        _counter.labels(_value)
# For GetStatus.
GENERATION_RATE = Rate()
PROMPT_RATE = Rate()
_COUNTERS: tuple[Counter | LoopCounter, ...] = (PREEMPTIONS, PREFIX_QUERIES, PREFIX_HITS, LATE_STEPS)
_NOTHING = (0,) * len(_COUNTERS)
_CACHED = PROMPT_TOKENS_BY_SOURCE.labels("local_cache_hit")
_COMPUTED = PROMPT_TOKENS_BY_SOURCE.labels("local_compute")
_REASONS = {reason: REQUEST_SUCCESS.labels(reason.name.lower()) for reason in FinishReason}


def on_first_step(request: Request, waited: float, exemplar: Mapping[str, str] | None) -> None:
    """Counts a request at its first step. waited: seconds since its arrival. exemplar: the labels of its trace."""
    num_prompt_tokens, num_cached_tokens = request.num_prompt_tokens, request.num_cached_tokens or 0
    QUEUE_TIME.observe(waited, exemplar)
    PROMPT_TOKENS.inc(num_prompt_tokens)
    PROMPT_RATE.add(num_prompt_tokens)
    CACHED_PROMPT_TOKENS.inc(num_cached_tokens)
    _CACHED.inc(num_cached_tokens)
    _COMPUTED.inc(num_prompt_tokens - num_cached_tokens)
    TENANTS.on_first_step(request.tenant.name, num_prompt_tokens, waited)


class Stats:
    """Turns the running totals of the scheduler's replicas into metrics. Gauges are read at a scrape, so that the cost
    of a step does not depend on the number of replicas."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._known: dict[Replica, tuple[int, ...]] = {}  # the totals that were already counted
        self._of_removed = [0] * len(_COUNTERS)
        NUM_RUNNING.set_function(lambda: scheduler.num_running)
        NUM_WAITING.set_function(lambda: scheduler.num_waiting)
        NUM_EXECUTORS.set_function(lambda: len(self._present()))
        STEP_LEAD.set_function(lambda: max((replica.pacer.lead for replica in self._present()), default=0))
        KV_CACHE_USAGE.set_function(self._kv_usage)

    def totals(self) -> list[int]:
        """Returns the totals of all replicas, including removed ones: preemptions, prefix tokens looked up and found,
        late steps."""
        totals = list(self._of_removed)
        for replica in self._scheduler.replicas:
            for index, number in enumerate(_totals_of(replica)):
                totals[index] += number
        return totals

    def on_removed(self, replica: Replica) -> None:
        self._count(replica)
        self._of_removed = [one + other for one, other in zip(self._of_removed, self._known.pop(replica), strict=True)]

    def on_step(self, replica: Replica, num_tokens: int, schedule_seconds: float) -> None:
        STEPS.inc()
        STEP_TOKENS.observe(num_tokens)
        SCHEDULE_TIME.observe(schedule_seconds)
        self._count(replica)

    def _count(self, replica: Replica) -> None:
        totals, known = _totals_of(replica), self._known.get(replica, _NOTHING)
        if totals != known:
            for counter, new, old in zip(_COUNTERS, totals, known, strict=True):
                counter.inc(new - old)
        self._known[replica] = totals

    def on_result(self, num_tokens: int, clock: StepClock) -> None:
        GENERATION_TOKENS.inc(num_tokens)
        GENERATION_RATE.add(num_tokens)
        EXECUTE_TIME.observe(clock.execute_seconds)
        EXECUTE_QUEUE_TIME.observe(clock.queue_seconds)

    def on_end(self, request: Request) -> None:
        assert request.finish_reason is not None
        _REASONS[request.finish_reason].inc()
        TENANTS.on_end(request.tenant.name, request.num_output_tokens)
        REQUEST_PROMPT_TOKENS.observe(request.num_prompt_tokens)
        REQUEST_GENERATION_TOKENS.observe(request.num_output_tokens)
        REQUEST_PREEMPTIONS.observe(request.num_preemptions)
        if request.num_cached_tokens is not None:
            REQUEST_COMPUTED_PROMPT_TOKENS.observe(request.num_prompt_tokens - request.num_cached_tokens)
        if request.sampling_params.HasField("max_tokens"):
            REQUEST_MAX_TOKENS.observe(request.sampling_params.max_tokens)

    def _present(self) -> list[Replica]:
        return [replica for replica in self._scheduler.replicas if replica.info]

    def _kv_usage(self) -> float:
        replicas = self._present()
        return sum(replica.kv.usage for replica in replicas) / len(replicas) if replicas else 0.0


def _totals_of(replica: Replica) -> tuple[int, ...]:
    """Returns the totals in the order of _COUNTERS."""
    return (
        replica.counts.num_preemptions,
        replica.counts.num_prefix_queries,
        replica.counts.num_prefix_hits,
        replica.pacer.num_late,
    )
