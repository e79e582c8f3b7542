"""Metrics with vLLM's names, for dashboards and alerts made for vLLM (--vllm-metrics).

Names and meanings are those of vLLM 0.33, and of earlier releases that dashboards still query.
"""

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.utils import floatToGoString

from pagewire.gateway.operation.exposition.text import Family, Sample, labels_of, labels_text, quoted

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
    "vllm:external_prefix_cache_queries": "pagewire:external_prefix_cache_queries",
    "vllm:external_prefix_cache_hits": "pagewire:external_prefix_cache_hits",
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
    # Each of n outputs is a request here, so it is the longest.
    "vllm:request_max_num_generation_tokens": "pagewire:request_generation_tokens",
    "vllm:request_params_max_tokens": "pagewire:request_params_max_tokens",
    "vllm:request_params_n": "pagewire:request_params_n",
    "vllm:request_num_preemptions": "pagewire:request_num_preemptions",
    "vllm:spec_decode_num_drafts": "pagewire:spec_decode_num_drafts",
    "vllm:spec_decode_num_draft_tokens": "pagewire:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "pagewire:spec_decode_num_accepted_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "pagewire:spec_decode_num_accepted_tokens_per_pos",
    "vllm:kv_offload_load_bytes": "pagewire:kv_offload_load_bytes",
    "vllm:kv_offload_load_time": "pagewire:kv_offload_load_time",
    "vllm:kv_offload_load_size": "pagewire:kv_offload_load_size",
    "vllm:kv_offload_store_bytes": "pagewire:kv_offload_store_bytes",
    "vllm:kv_offload_store_time": "pagewire:kv_offload_store_time",
    "vllm:kv_offload_store_size": "pagewire:kv_offload_store_size",
    "vllm:kv_offload_stores_skipped": "pagewire:kv_offload_stores_skipped",
    "vllm:kv_offload_allocation_failure": "pagewire:kv_offload_allocation_failure",
    "vllm:kv_offload_cpu_cache_usage_perc": "pagewire:kv_offload_cpu_cache_usage_perc",
    "vllm:lora_requests_info": "pagewire:lora_requests_info",
    "vllm:engine_sleep_state": "pagewire:executor_sleep_state",
    "vllm:cuda_graphs": "pagewire:executor_cuda_graphs",
    "vllm:attention_backend": "pagewire:executor_attention_backend",
    "http_requests": "pagewire:http_requests",
    "http_request_duration_seconds": "pagewire:http_request_duration_seconds",
}
# Metrics with a label that ours lack: our name, the label, and the value; None: our value. Nothing is deferred.
# docs/operations.md names those without a counterpart.
DERIVED: dict[str, Sequence[tuple[str, dict[str, str], float | None]]] = {
    "vllm:num_requests_waiting_by_reason": [
        ("pagewire:num_requests_waiting", {"reason": "capacity"}, None),
        ("pagewire:num_requests_waiting", {"reason": "deferred"}, 0),
    ],
    "vllm:prompt_tokens_cached_by_source": [("pagewire:prompt_tokens_cached", {"source": "device"}, None)],
    "vllm:rl_weight_update_operation_duration_seconds": [
        ("pagewire:executor_weights_load_seconds", {"operation": "load"}, None),
        ("pagewire:executor_weights_install_seconds", {"operation": "install"}, None),
    ],
}
# Our labels -> vLLM's.
_LABELS = {"executor": "engine", "route": "handler"}


def vllm_families(families: Iterable[Family]) -> list[Family]:
    """Returns the metrics that vLLM has a name for."""
    present = {family.name: family for family in families}
    named = [_renamed(present[ours], name) for name, ours in ALIASES.items() if ours in present]
    return named + [_derived(present, name) for name, parts in DERIVED.items() if parts[0][0] in present]


def _derived(present: Mapping[str, Family], name: str) -> Family:
    result = Family(name)
    for ours, labels, value in DERIVED[name]:
        if (part := present.get(ours)) is None:
            continue
        result.kind, result.documentation = part.kind, result.documentation or part.documentation
        for one in _renamed(part, name).samples:
            all_labels = labels_of(one.labels) | {label: quoted(text) for label, text in labels.items()}
            text = one.value if value is None else floatToGoString(value)
            result.samples.append(one._replace(labels=labels_text(all_labels), value=text))
    return result


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
        # Metrics of the whole service count for the first executor.
        labels["engine"] = labels.get("engine", '"0"').replace('"executor-', '"', 1)
    return labels_text(labels)


def _summed(requests: Iterable[Sample]) -> list[Sample]:
    """Returns one sample for each class of status."""
    sums: dict[str, float] = {}
    for one in requests:
        labels = labels_of(_labels("", one.labels))
        labels["status"] = f'{labels["status"][:2]}xx"'
        text = labels_text(labels)
        sums[text] = sums.get(text, 0.0) + float(one.value)
    return [Sample("http_requests_total", labels, floatToGoString(value), "") for labels, value in sums.items()]
