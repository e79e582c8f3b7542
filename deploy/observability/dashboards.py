"""The dashboards as tables. After a change: python -m deploy.observability"""

from deploy.observability.panels import Dashboard, Panel
from deploy.observability.rules import Objectives, ratio

_SHARES = (0.5, 0.95, 0.99)


def _rate(selector: str, *by: str) -> str:
    """Per second; the selector names labels itself, and $m among them."""
    labels = ", ".join(by)
    return f"sum by ({labels}) (rate({selector}[$w]))" if by else f"sum(rate({selector}[$w]))"


def _quantiles(histogram: str) -> dict[str, str]:
    return {f"p{round(100 * q)}": _quantile(q, histogram) for q in _SHARES}


def _quantile(q: float, histogram: str) -> str:
    return f"histogram_quantile({q}, {_rate(f'{histogram}_bucket{{$m}}', 'le')})"


def _mean(histogram: str) -> str:
    return f"{_rate(f'{histogram}_sum{{$m}}')} / {_rate(f'{histogram}_count{{$m}}')}"


def _share(part: str, whole: str) -> str:
    return f"{_rate(f'{part}{{$m}}')} / {_rate(f'{whole}{{$m}}')}"


_TTFT, _TPOT = "pagewire:time_to_first_token_seconds", "pagewire:request_time_per_output_token_seconds"
_TOKENS, _REQUESTS = "pagewire:generation_tokens_total", "pagewire:http_requests_total"
_FAILED = _rate(f'{_REQUESTS}{{$m, status=~"5.."}}')
_ERRORS = ratio(_FAILED, _rate(f"{_REQUESTS}{{$m}}"))
_RUNNING, _WAITING = "sum(pagewire:num_requests_running{$m})", "sum(pagewire:num_requests_waiting{$m})"
_KV = "max(pagewire:kv_cache_usage_perc{$m})"
_HITS = _share("pagewire:prefix_cache_hits_total", "pagewire:prefix_cache_queries_total")
_POOL = "pagewire:tokenizer_pool"


def _overview(goal: Objectives) -> Dashboard:
    return Dashboard("pagewire-overview", "Pagewire: overview", {
        "Now": [
            Panel("Executors", {"executors": "sum(pagewire:num_executors{$m})"}, now=True),
            Panel("Running", {"running": _RUNNING}, now=True),
            Panel("Waiting", {"waiting": _WAITING}, now=True),
            Panel("Output tokens/s", {"tokens": _rate(f"{_TOKENS}{{$m}}")}, now=True),
            Panel("First token, p99", {"p99": _quantile(0.99, _TTFT)}, "s", now=True, threshold=goal.ttft_s),
            Panel("KV cache", {"in use": _KV}, "percentunit", now=True, threshold=0.9),
        ],
        "Traffic": [
            Panel("Requests/s", {"{{status}}": _rate(f"{_REQUESTS}{{$m}}", "status")}, "reqps",
                  "By status; without probes and scrapes."),
            Panel("Failed requests", {"5xx": _ERRORS}, "percentunit", "Share of answers with 5xx."),
            Panel("Tokens/s", {
                "output": _rate(f"{_TOKENS}{{$m}}"),
                "prompt, computed": _rate('pagewire:prompt_tokens_by_source_total{$m, source="local_compute"}'),
                "prompt, cached": _rate('pagewire:prompt_tokens_by_source_total{$m, source="local_cache_hit"}'),
            }),
        ],
        "Clients": [
            Panel("Time to first token", _quantiles(_TTFT), "s", threshold=goal.ttft_s),
            Panel("Time per output token", _quantiles(_TPOT), "s", threshold=goal.tpot_s),
            Panel("Requests", {"running": _RUNNING, "waiting": _WAITING}),
        ],
        "Room": [
            Panel("KV cache", {"in use": _KV}, "percentunit", threshold=0.9),
            Panel("Found in the prefix cache", {"prompt tokens": _HITS}, "percentunit"),
            Panel("Processors", {"{{service}}": 'sum by (service) (rate(process_cpu_seconds_total{service!=""}[$w]))'},
                  "short", "Cores that each service keeps busy."),
        ],
    })  # fmt: skip


def _latency(goal: Objectives) -> Dashboard:
    return Dashboard("pagewire-latency", "Pagewire: latency", {
        "What clients see": [
            Panel("Time to first token", _quantiles(_TTFT), "s", threshold=goal.ttft_s),
            Panel("Time between deliveries of tokens", _quantiles("pagewire:inter_token_latency_seconds"), "s"),
            Panel("Time per output token", _quantiles(_TPOT), "s", threshold=goal.tpot_s),
            Panel("Whole request", _quantiles("pagewire:e2e_request_latency_seconds"), "s"),
            Panel("HTTP, by route (p95)", {
                "{{route}}": "histogram_quantile(0.95, "
                + _rate("pagewire:http_request_duration_seconds_bucket{$m}", "route", "le") + ")",
            }, "s"),
            Panel("Forecast error of the first token", {
                **_quantiles("pagewire:time_to_first_token_forecast_error_seconds"),
            }, "s", "Admission uses this forecast: far above 0, it admits requests that miss their deadline."),
        ],
        "Where the time goes": [
            Panel("Waiting for a first step", _quantiles("pagewire:request_queue_time_seconds"), "s"),
            Panel("Prompt", _quantiles("pagewire:request_prefill_time_seconds"), "s", "First step to first token."),
            Panel("Output", _quantiles("pagewire:request_decode_time_seconds"), "s", "First token to the end."),
            Panel("Mean time of a request", {
                "waiting": _mean("pagewire:request_queue_time_seconds"),
                "prompt": _mean("pagewire:request_prefill_time_seconds"),
                "output": _mean("pagewire:request_decode_time_seconds"),
            }, "s"),
            Panel("Prompt tokens", _quantiles("pagewire:request_prompt_tokens")),
            Panel("Output tokens", _quantiles("pagewire:request_generation_tokens")),
        ],
    })  # fmt: skip


def _scheduler(_: Objectives) -> Dashboard:
    steps = f"{_rate('pagewire:steps_total{$m}')}"
    return Dashboard("pagewire-scheduler", "Pagewire: KV cache and scheduler", {
        "KV cache": [
            Panel("In use", {"{{executor}}": "pagewire:executor_kv_cache_usage_perc{$m}"}, "percentunit",
                  threshold=0.9),
            Panel("Preemptions/s", {"preemptions": _rate("pagewire:num_preemptions_total{$m}")}, "ops",
                  "Requests that lost their blocks and are computed again.", threshold=0.1),
            Panel("Found in the prefix cache", {"prompt tokens": _HITS}, "percentunit"),
        ],
        "Queue": [
            Panel("Requests", {"running": _RUNNING, "waiting": _WAITING}),
            Panel("Time in the queue", _quantiles("pagewire:request_queue_time_seconds"), "s"),
            Panel("Refused and expired/s", {
                "refused: {{reason}}": _rate("pagewire:requests_refused_total{$m}", "reason"),
                "expired: {{stage}}": _rate("pagewire:requests_expired_total{$m}", "stage"),
            }, "reqps"),
        ],
        "Steps": [
            Panel("Steps/s", {"steps": steps, "late": _rate("pagewire:late_steps_total{$m}")}, "ops",
                  "Late steps were decided when the device was already idle."),
            Panel("Tokens per step", _quantiles("pagewire:iteration_tokens")),
            Panel("Time to decide a step", _quantiles("pagewire:schedule_time_seconds"), "s"),
            Panel("Time of a step", _quantiles("pagewire:execute_time_seconds"), "s"),
            Panel("Waiting in the executor", _quantiles("pagewire:execute_queue_time_seconds"), "s"),
            Panel("Ended, by reason", {
                "{{finished_reason}}": _rate("pagewire:request_success_total{$m}", "finished_reason"),
            }, "reqps"),
        ],
    })  # fmt: skip


def _executors(_: Objectives) -> Dashboard:
    drafts = "pagewire:spec_decode_num"
    return Dashboard("pagewire-executors", "Pagewire: executors", {
        "Work": [
            Panel("Requests", {"{{executor}}": "pagewire:executor_requests_running{$m}"}),
            Panel("Output tokens/s", {
                "{{executor}}": _rate("pagewire:executor_generation_tokens_total{$m}", "executor"),
            }),
            Panel("Steps/s, by kind", {"{{kind}}": _rate("pagewire:executor_steps_total{$m}", "kind")}, "ops"),
            Panel("Device busy", {"busy": _rate("pagewire:executor_step_seconds_sum{$m}")
                                  + " / sum(pagewire:num_executors{$m})"}, "percentunit",
                  "Share of the time with a running step, averaged over executors."),
            Panel("Device time of a step", _quantiles("pagewire:executor_step_seconds"), "s"),
            Panel("Launches/s", {"{{mode}}": _rate("pagewire:executor_graph_steps_total{$m}", "mode")}, "ops",
                  "Replayed steps are faster than eager ones."),
        ],
        "Failures": [
            Panel("Executors", {"executors": "sum(pagewire:num_executors{$m})",
                                "leaving": "sum(pagewire:executor_is_leaving{$m})"}),
            Panel("Lost executors", {"lost": "sum(increase(pagewire:recoveries_total{$m}[$w]))"}),
            Panel("Failures/s", {
                "steps": _rate("pagewire:executor_failed_steps_total{$m}"),
                "requests: {{cause}}": _rate("pagewire:executor_failed_requests_total{$m}", "cause"),
                "given up: {{cause}}": _rate("pagewire:requests_condemned_total{$m}", "cause"),
            }, "ops"),
        ],
        "Memory": [
            Panel("KV cache", {"reserved": "sum(pagewire:executor_kv_cache_bytes{$m})",
                               "used so far": "sum(pagewire:executor_kv_cache_resident_bytes{$m})"}, "bytes"),
            Panel("Weights", {"weights": "sum(pagewire:executor_weight_bytes{$m})"}, "bytes"),
            Panel("Resident memory", {"{{service}}": 'sum by (service) (process_resident_memory_bytes{service!=""})'},
                  "bytes"),
        ],
        "Speculation and grammars": [
            Panel("Drafted tokens/s", {"drafted": _rate(f"{drafts}_draft_tokens_total{{$m}}"),
                                       "accepted": _rate(f"{drafts}_accepted_tokens_total{{$m}}")}, "ops"),
            Panel("Drafted tokens accepted",
                  {"share": _share(f"{drafts}_accepted_tokens_total", f"{drafts}_draft_tokens_total")}, "percentunit"),
            Panel("Requests with a grammar", {"requests": "sum(pagewire:executor_constrained_requests{$m})"}),
        ],
    })  # fmt: skip


def _tokenizers(_: Objectives) -> Dashboard:
    return Dashboard("pagewire-tokenizers", "Pagewire: gateway and tokenizer pool", {
        "Tokenizer pool": [
            Panel("Workers", {"workers": f"sum({_POOL}_workers{{$m}})", "busy": f"sum({_POOL}_busy_workers{{$m}})"}),
            Panel("Busy", {"workers": f"{_rate(f'{_POOL}_busy_seconds_total{{$m}}')} / sum({_POOL}_workers{{$m}})"},
                  "percentunit"),
            Panel("Waiting texts", {"texts": f"sum({_POOL}_queue_length{{$m}})"}),
            Panel("Waiting for a worker", _quantiles(f"{_POOL}_wait_seconds"), "s", threshold=0.1),
            Panel("Rendering and encoding a prompt", _quantiles("pagewire:tokenizer_encode_seconds"), "s"),
            Panel("Failures/s", {
                "refused": _rate(f"{_POOL}_refusals_total{{$m}}"),
                "too long": _rate(f"{_POOL}_given_up_total{{$m}}"),
                "deadline passed": _rate("pagewire:tokenizer_prompts_expired_total{$m}"),
                "workers died": _rate(f"{_POOL}_worker_deaths_total{{$m}}"),
            }, "ops"),
        ],
        "Gateway": [
            Panel("Connections", {"{{phase}}": "sum by (phase) (pagewire:http_connections{$m})",
                                  "limit": "sum(pagewire:http_connection_limit{$m})"}),
            Panel("Closed/s", {"{{reason}}": _rate("pagewire:http_connections_closed_total{$m}", "reason"),
                               "client gone": _rate("pagewire:gateway_clients_gone_total{$m}")}, "ops"),
            Panel("Resubmitted/s", {"by the gateway": _rate("pagewire:gateway_resubmitted_requests_total{$m}"),
                                   "by the tokenizer": _rate("pagewire:tokenizer_resubmissions_total{$m}")}, "ops",
                  "Requests that were resubmitted after a stream broke; clients did not notice."),
        ],
    })  # fmt: skip


def _tenants(_: Objectives) -> Dashboard:
    tenant = "pagewire:tenant"
    return Dashboard("pagewire-tenants", "Pagewire: tenants", {
        "The 20 tenants with the most tokens; all others together": [
            Panel("Output tokens/s", {"{{tenant}}": _rate(f"{tenant}_generation_tokens_total{{$m}}", "tenant")}),
            Panel("Prompt tokens/s", {"{{tenant}}": _rate(f"{tenant}_prompt_tokens_total{{$m}}", "tenant")}),
            Panel("Requests/s", {"{{tenant}}": _rate(f"{tenant}_requests_total{{$m}}", "tenant")}, "reqps"),
            Panel("Mean time in the queue", {
                "{{tenant}}": _rate(f"{tenant}_queue_seconds_total{{$m}}", "tenant")
                + " / " + _rate(f"{tenant}_requests_total{{$m}}", "tenant"),
            }, "s"),
            Panel("Share of all tokens", {
                "{{tenant}}": f"{_rate(f'{tenant}_generation_tokens_total{{$m}}', 'tenant')}"
                f" / on () group_left () {_rate(f'{tenant}_generation_tokens_total{{$m}}')}",
            }, "percentunit"),
        ],
    })  # fmt: skip


def _budgets(goal: Objectives) -> Dashboard:
    budget = 1 - goal.share
    limits = {"5m": 14.4 * budget, "1h": 14.4 * budget, "30m": 6 * budget, "6h": 6 * budget}
    rows = {}
    for title, recorded in (
        ("Requests that failed", "model:errors"),
        (f"First tokens later than {goal.ttft_s:g} s", "model:late_first_tokens"),
    ):
        rows[title] = [
            Panel(f"in {window}", {"{{model_name}}": f"{recorded}:ratio_{window}{{$m}}"}, "percentunit",
                  f"Above the line, the budget of {budget:.2g} is spent too fast.", threshold=round(limit, 6))
            for window, limit in limits.items()
        ]  # fmt: skip
    rows["Alerts"] = [
        Panel("Firing", {"{{alertname}}": 'count by (alertname) (ALERTS{alertstate="firing"}) or vector(0)'}),
        Panel("p99 of the first token", {"{{model_name}}": "model:ttft_seconds:p99{$m}"}, "s", threshold=goal.ttft_s),
        Panel("p99 of time per token", {"{{model_name}}": "model:tpot_seconds:p99{$m}"}, "s", threshold=goal.tpot_s),
    ]
    return Dashboard("pagewire-budgets", "Pagewire: objectives and budgets", rows)


def dashboards(goal: Objectives) -> list[Dashboard]:
    tables = (_overview, _latency, _scheduler, _executors, _tokenizers, _tenants, _budgets)
    return [table(goal) for table in tables]
