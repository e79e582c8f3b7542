"""vLLM's names for what Pagewire measures, so that dashboards and alerts made for vLLM fill (--vllm-metrics).

Names and meanings are those of vLLM 0.33, and those of earlier releases that dashboards still ask for.
"""

from collections.abc import Iterable

from prometheus_client.utils import floatToGoString

from pagewire.gateway.exposition.text import Family, Sample, labels_of, labels_text

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


def vllm_families(families: Iterable[Family]) -> list[Family]:
    """Of all that has a name there."""
    present = {family.name: family for family in families}
    return [_renamed(present[ours], name) for name, ours in ALIASES.items() if ours in present]


def _renamed(family: Family, name: str) -> Family:
    if name == "http_requests":
        samples = _summed(family.samples)
    else:
        named = {labels: _labels(name, labels) for labels in {one.labels for one in family.samples}}
        samples = [
            Sample(name + one.name.removeprefix(family.name), named[one.labels], one.value, one.exemplar)
            for one in family.samples
        ]
    return Family(name, family.kind, family.documentation, samples)


def _labels(name: str, text: str) -> str:
    labels = {_LABELS.get(label, label): value for label, value in labels_of(text).items()}
    if name.startswith("vllm:"):
        # What is measured in front of all executors is the first one's.
        labels["engine"] = labels.get("engine", '"0"').replace('"executor-', '"', 1)
    return labels_text(labels)


def _summed(requests: Iterable[Sample]) -> list[Sample]:
    """One of each class of status."""
    sums: dict[str, float] = {}
    for one in requests:
        labels = labels_of(_labels("", one.labels))
        labels["status"] = f'{labels["status"][:2]}xx"'
        text = labels_text(labels)
        sums[text] = sums.get(text, 0.0) + float(one.value)
    return [Sample("http_requests_total", labels, floatToGoString(value), "") for labels, value in sums.items()]
