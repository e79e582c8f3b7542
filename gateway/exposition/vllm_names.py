"""vLLM's names for what Pagewire measures, so that dashboards and alerts made for vLLM fill (--vllm-metrics).

Names and meanings are those of vLLM 0.33, and those of earlier releases that dashboards still ask for.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby

from prometheus_client import Metric
from prometheus_client.samples import Sample

# vLLM's name -> ours; types are the same.
ALIASES = {
    "vllm:num_requests_running": "pagewire:executor_requests_running",
    "vllm:num_requests_waiting": "pagewire:num_requests_waiting",
    "vllm:kv_cache_usage_perc": "pagewire:executor_kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc": "pagewire:executor_kv_cache_usage_perc",
    "vllm:cache_config_info": "pagewire:executor_cache_config_info",
    "vllm:prefix_cache_queries": "pagewire:prefix_cache_queries",
    "vllm:prefix_cache_hits": "pagewire:prefix_cache_hits",
    "vllm:gpu_prefix_cache_queries": "pagewire:prefix_cache_queries",
    "vllm:gpu_prefix_cache_hits": "pagewire:prefix_cache_hits",
    "vllm:num_preemptions": "pagewire:num_preemptions",
    "vllm:prompt_tokens": "pagewire:prompt_tokens",
    "vllm:prompt_tokens_cached": "pagewire:prompt_tokens_cached",
    "vllm:prompt_tokens_by_source": "pagewire:prompt_tokens_by_source",
    "vllm:generation_tokens": "pagewire:generation_tokens",
    "vllm:request_success": "pagewire:request_success",
    "vllm:admission_rejections": "pagewire:requests_refused",
    "vllm:iteration_tokens_total": "pagewire:iteration_tokens",
    "vllm:time_to_first_token_seconds": "pagewire:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds": "pagewire:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds": "pagewire:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds": "pagewire:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds": "pagewire:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds": "pagewire:request_queue_time_seconds",
    "vllm:request_inference_time_seconds": "pagewire:request_inference_time_seconds",
    "vllm:request_prefill_time_seconds": "pagewire:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds": "pagewire:request_decode_time_seconds",
    "vllm:request_prompt_tokens": "pagewire:request_prompt_tokens",
    "vllm:request_prefill_kv_computed_tokens": "pagewire:request_computed_prompt_tokens",
    "vllm:request_generation_tokens": "pagewire:request_generation_tokens",
    # Each of n outputs is a request here: the longest of one is its own.
    "vllm:request_max_num_generation_tokens": "pagewire:request_generation_tokens",
    "vllm:request_params_max_tokens": "pagewire:request_params_max_tokens",
    "vllm:request_params_n": "pagewire:request_params_n",
    "vllm:request_num_preemptions": "pagewire:request_num_preemptions",
    "vllm:spec_decode_num_drafts": "pagewire:spec_decode_num_drafts",
    "vllm:spec_decode_num_draft_tokens": "pagewire:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "pagewire:spec_decode_num_accepted_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "pagewire:spec_decode_num_accepted_tokens_per_pos",
    "http_requests": "pagewire:http_requests",
    "http_request_duration_seconds": "pagewire:http_request_duration_seconds",
}
# What its labels are called there.
_LABELS = {"executor": "engine", "route": "handler"}


def vllm_families(families: Iterable[Metric]) -> list[Metric]:
    """Of all that has a name there."""
    present = {family.name: family for family in families}
    return [_renamed(present[ours], name) for name, ours in ALIASES.items() if ours in present]


def _renamed(family: Metric, name: str) -> Metric:
    result = Metric(name, family.documentation, family.type)
    samples: Iterable[Sample] = (
        one._replace(name=name + one.name.removeprefix(family.name), labels=_labels(name, one.labels))
        for one in family.samples
    )
    result.samples = list(_summed(samples) if name == "http_requests" else samples)
    return result


def _labels(name: str, labels: dict[str, str]) -> dict[str, str]:
    renamed = {_LABELS.get(label, label): value for label, value in labels.items()}
    if name.startswith("vllm:"):
        # What is measured in front of all executors is the first one's.
        renamed["engine"] = renamed.get("engine", "0").removeprefix("executor-")
    if name == "http_requests":
        renamed["status"] = f"{renamed['status'][:1]}xx"
    return renamed


def _summed(samples: Iterable[Sample]) -> Iterator[Sample]:
    """One of each set of labels."""
    ordered = sorted(samples, key=lambda one: sorted(one.labels.items()))
    for _, group in groupby(ordered, key=lambda one: one.labels):
        alike = list(group)
        yield alike[0]._replace(value=sum(one.value for one in alike), exemplar=None)
