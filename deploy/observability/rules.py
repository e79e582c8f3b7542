"""The recording rules and alerts of Prometheus, as tables. `text` makes the file that it reads.

Each alert has a section in docs/runbook.md with causes and remedies.
"""

from dataclasses import dataclass

import yaml

from pagewire.telemetry.metrics import LATENCY_BUCKETS

# Windows of burn rates of an error budget of 30 days, from Google's SRE workbook (chapter 5). At the rate of the fast
# pair 2 % of the budget is used up in an hour, at that of the slow pair 5 % in six hours.
_FAST, _SLOW = (14.4, "5m", "1h"), (6.0, "30m", "6h")
_WINDOWS = (_FAST[1], _SLOW[1], _FAST[2], _SLOW[2])


@dataclass(frozen=True)
class Objectives:
    """The promises to clients. Raises ValueError if it cannot be measured."""

    ttft_s: float = 0.5  # seconds to the first token; one of LATENCY_BUCKETS, so that the share of late ones is exact
    tpot_s: float = 0.05  # seconds per token after it, for 99 % of requests
    share: float = 0.99  # of requests that are answered, and in time

    def __post_init__(self) -> None:
        if self.ttft_s not in LATENCY_BUCKETS:
            buckets = ", ".join(f"{bound:g}" for bound in LATENCY_BUCKETS)
            raise ValueError(f"the histograms do not count requests within {self.ttft_s:g} s: choose one of {buckets}")
        if not 0 < self.share < 1:
            raise ValueError(f"the share of good requests is between 0 and 1, not {self.share:g}")


@dataclass(frozen=True)
class Alert:
    name: str
    expr: str
    hold: str  # how long the condition must hold
    severity: str  # critical: clients notice now; warning: they will, or some do
    summary: str


def ratio(part: str, whole: str) -> str:
    """Returns a ratio of rates by model: 0 without the part, nothing without the whole."""
    return f"({part} or 0 * {whole}) / {whole}"


def _rate(selector: str, window: str, by: str = "model_name") -> str:
    return f"sum by ({by}) (rate({selector}[{window}]))"


def _quantile(q: float, histogram: str, window: str = "5m") -> str:
    return f"histogram_quantile({q}, {_rate(f'{histogram}_bucket', window, 'model_name, le')})"


def recordings(goal: Objectives) -> dict[str, str]:
    """Returns PromQL by the name under which it is recorded, all by model_name."""
    ttft = "pagewire:time_to_first_token_seconds"
    recorded = {
        "model:ttft_seconds:p99": _quantile(0.99, ttft),
        "model:tpot_seconds:p99": _quantile(0.99, "pagewire:request_time_per_output_token_seconds"),
        "model:queue_seconds:p95": _quantile(0.95, "pagewire:request_queue_time_seconds"),
        "model:tokenizer_wait_seconds:p95": _quantile(0.95, "pagewire:tokenizer_pool_wait_seconds"),
    }
    for window in _WINDOWS:
        hits, queries = "pagewire:prefix_cache_hits_total", "pagewire:prefix_cache_queries_total"
        recorded[f"model:prefix_hits:ratio_{window}"] = f"{_rate(hits, window)} / {_rate(queries, window)}"
        requests = "pagewire:http_requests_total"
        failed = requests + '{status=~"5.."}'
        # 4xx do not count: clients may repeat them in a loop, which would hide failures.
        counted = requests + '{status!~"4.."}'
        recorded[f"model:errors:ratio_{window}"] = ratio(_rate(failed, window), _rate(counted, window))
        in_time = f'{ttft}_bucket{{le="{goal.ttft_s}"}}'
        late = f"1 - {_rate(in_time, window)} / {_rate(f'{ttft}_count', window)}"
        recorded[f"model:late_first_tokens:ratio_{window}"] = late
    return recorded


def _burns(recorded: str, goal: Objectives, pair: tuple[float, str, str]) -> str:
    factor, short, long = pair
    limit = f"{factor * (1 - goal.share):.4g}"
    return f"{recorded}:ratio_{short} > {limit} and {recorded}:ratio_{long} > {limit}"


def alerts(goal: Objectives) -> list[Alert]:
    requests = "(pagewire:num_requests_running + pagewire:num_requests_waiting)"
    return [
        # Is it there?
        Alert(
            "PagewireDown", 'up{job="pagewire"} == 0 or absent(up{job="pagewire"})', "1m", "critical",
            "Prometheus cannot read the metrics of {{ $labels.instance }}",
        ),
        Alert(
            "PagewireServiceMissing",
            " or ".join(
                f'absent(pagewire:asyncio_tasks{{service="{service}"}}) and on () max(up{{job="pagewire"}}) == 1'
                for service in ("tokenizer", "scheduler")
            ),
            "1m", "critical", "No {{ $labels.service }} answers the services in front of it",
        ),
        Alert(
            "PagewireNoExecutor",
            "max by (model_name) (pagewire:num_executors) == 0 "
            'unless max by (model_name) (pagewire:executor_sleep_state{sleep_state!="awake"}) == 1',
            "30s", "critical",
            "The scheduler of {{ $labels.model_name }} has no executor: requests wait, and will fail",
        ),
        Alert(
            "PagewireExecutorLost", "increase(pagewire:recoveries_total[10m]) > 0", "0s", "warning",
            "An executor of {{ $labels.model_name }} was lost in the last ten minutes",
        ),
        Alert(
            "PagewireStalled",
            f"sum by (model_name) {requests} > 0 and {_rate('pagewire:execute_time_seconds_count', '2m')} == 0",
            "1m", "critical", "{{ $value }} requests of {{ $labels.model_name }} run or wait, but no step finishes",
        ),
        # Is it good enough?
        Alert(
            "PagewireErrorBudgetFast", _burns("model:errors", goal, _FAST), "2m", "critical",
            "{{ $value | humanizePercentage }} of requests fail: the error budget of 30 days lasts two days or less",
        ),
        Alert(
            "PagewireErrorBudgetSlow", _burns("model:errors", goal, _SLOW), "15m", "warning",
            "{{ $value | humanizePercentage }} of requests fail: the error budget of 30 days lasts five days or less",
        ),
        Alert(
            "PagewireFirstTokenBudgetFast", _burns("model:late_first_tokens", goal, _FAST), "2m", "critical",
            f"{{{{ $value | humanizePercentage }}}} of first tokens take longer than {goal.ttft_s:g} s",
        ),
        Alert(
            "PagewireFirstTokenBudgetSlow", _burns("model:late_first_tokens", goal, _SLOW), "15m", "warning",
            f"{{{{ $value | humanizePercentage }}}} of first tokens take longer than {goal.ttft_s:g} s",
        ),
        Alert(
            "PagewireFirstTokenSlow", f"model:ttft_seconds:p99 > {goal.ttft_s:g}", "10m", "warning",
            "One first token in 100 takes {{ $value | humanizeDuration }} or longer;"
            f" the objective is {goal.ttft_s:g} s",
        ),
        Alert(
            "PagewireTokensSlow", f"model:tpot_seconds:p99 > {goal.tpot_s:g}", "10m", "warning",
            "One request in 100 takes {{ $value | humanizeDuration }} or more per token;"
            f" the objective is {goal.tpot_s:g} s",
        ),
        # Is there room?
        Alert(
            "PagewireKVCacheFull", "max by (model_name) (avg_over_time(pagewire:kv_cache_usage_perc[5m])) > 0.9",
            "1m", "warning",
            "{{ $value | humanizePercentage }} of the KV blocks of {{ $labels.model_name }} are in use",
        ),
        Alert(
            "PagewirePreemptions", f"{_rate('pagewire:num_preemptions_total', '5m')} > 0.1", "5m", "warning",
            "{{ $value | humanize }} requests per second are preempted and computed again",
        ),
        Alert(
            "PagewireQueueLong", "model:queue_seconds:p95 > 5", "5m", "warning",
            "One request in 20 waits {{ $value | humanizeDuration }} or longer for its first step",
        ),
        Alert(
            "PagewireRefusals",
            ratio(_rate("pagewire:requests_refused_total", "5m"), _rate("pagewire:request_success_total", "5m"))
            + " > 0.01",
            "5m", "warning", "{{ $value | humanize }} requests are refused for each that ends",
        ),
        Alert(
            "PagewireDeadlinesMissed", f"{_rate('pagewire:requests_expired_total', '5m')} > 0.1", "5m", "warning",
            "{{ $value | humanize }} requests per second end because their deadline passes",
        ),
        Alert(
            "PagewireTokenizersBusy", "model:tokenizer_wait_seconds:p95 > 0.1", "5m", "warning",
            "One text in 20 waits {{ $value | humanizeDuration }} or longer for a tokenizer worker",
        ),
        Alert(
            "PagewireConnectionsFull",
            "sum by (model_name) (pagewire:http_connections)"
            " / sum by (model_name) (pagewire:http_connection_limit) > 0.9",
            "5m", "warning", "{{ $value | humanizePercentage }} of the gateway's connections are in use",
        ),
        # Does something go wrong quietly?
        Alert(
            "PagewirePrefixHitsCollapsed",
            "model:prefix_hits:ratio_30m < 0.5 * model:prefix_hits:ratio_6h and model:prefix_hits:ratio_6h > 0.2",
            "15m", "warning", "Only {{ $value | humanizePercentage }} of prompt tokens are found in the prefix cache",
        ),
        Alert(
            "PagewireLateSteps",
            f"{_rate('pagewire:late_steps_total', '5m')} / {_rate('pagewire:steps_total', '5m')} > 0.2",
            "10m", "warning", "The device had to wait for {{ $value | humanizePercentage }} of steps",
        ),
        Alert(
            "PagewireRequestsCondemned", "increase(pagewire:requests_condemned_total[15m]) > 0", "0s", "warning",
            "A request ended because executors failed ({{ $labels.cause }}) whenever they ran it",
        ),
        Alert(
            "PagewireFailedSteps", "increase(pagewire:executor_failed_steps_total[15m]) > 0", "0s", "warning",
            "A step failed, and its requests were tried again",
        ),
        Alert(
            "PagewireTokenizerWorkerDied", "increase(pagewire:tokenizer_pool_worker_deaths_total[15m]) > 0", "0s",
            "warning", "A tokenizer worker died while working",
        ),
    ]  # fmt: skip


def text(goal: Objectives, runbook: str) -> str:
    """Returns the file of rules. runbook: address of docs/runbook.md."""
    recorded = [{"record": name, "expr": expr} for name, expr in recordings(goal).items()]
    raised = [
        {
            "alert": one.name,
            "expr": one.expr,
            "for": one.hold,
            "labels": {"severity": one.severity},
            "annotations": {"summary": one.summary, "runbook_url": f"{runbook}#{one.name.lower()}"},
        }
        for one in alerts(goal)
    ]
    groups = [{"name": "pagewire-recorded", "rules": recorded}, {"name": "pagewire-alerts", "rules": raised}]
    head = "# Made by `python -m deploy.observability` from deploy/observability/rules.py.\n"
    return head + yaml.safe_dump({"groups": groups}, sort_keys=False, width=1000)
