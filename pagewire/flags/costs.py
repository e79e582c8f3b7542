"""Phrases about the costs and the savings of settings, with bytes that follow from the model's files."""

from collections.abc import Callable
from typing import Any

from pagewire.config.executor import SMALLEST, ExecutorConfig
from pagewire.config.profiles import runs_on_cuda
from pagewire.config.speculation import Speculation
from pagewire.config.values import drafts
from pagewire.files.models import local_model
from pagewire.files.sampling_defaults.defaults import sampling_defaults
from pagewire.flags.model_facts import ModelFacts

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1, "fp8_e4m3": 1, "int8": 1}

_PHRASES = {
    "max_num_seqs": "more: more tokens per second in all, fewer for each request, and more memory for buffers",
    "max_num_batched_tokens": "more: prompts finish sooner; fewer: running requests wait less, and buffers are smaller",
    "target_itl_ms": "less: steadier streams, but later first tokens; 0: prompts first",
    "max_num_partial_prefills": "more: short prompts pass long ones, but each gets less of a step",
    "enable_chunked_prefill": "off: running requests wait for whole prompts",
    "enable_prefix_caching": "saves the common beginnings of prompts; costs a hash for each block",
    "prefix_cache_sharing": "all: more hits, but response times reveal prompts to other tenants",
    "max_waiting_requests": "more: fewer requests are refused, more wait, with their prompts in memory",
    "idle_timeout": "saves memory while no request comes; the next request waits for the wake",
    "max_queue_time": "less: requests with a long wait are refused at once; 0: none is",
    "pipeline_depth": "2: the next step is prepared while one runs",
    "scheduling_policy": "priority: requests of low priority wait, and are preempted first",
    "block_size": "larger: fewer blocks to manage, shorter hits in the prefix cache",
    "gpu_memory_utilization": "more: a larger KV cache, less memory for other programs on the device",
    "kv_cache_dtype": "int8, fp8, smallest: keys and values need half the memory and are less exact, with int8 least",
    "num_gpu_blocks_override": "for tests: few blocks force preemption",
    "mm_encoder_cache_bytes": "saves encoding the same image again; costs this much memory",
    "grammar_cache_size": "saves compiling the same grammar again; large grammars need some MB each",
    "dtype": "float32: exact, but twice the memory and time of 16 bits",
    "quantization": "4 bits: a quarter of the memory of 16 bits, decodes up to as much faster, less exact",
    "weights_cache": "saves packing weights at the next start; costs their size on disk",
    "enforce_eager": "on: no graphs to capture and keep, but every step launches each kernel",
    "cudagraph_capture_sizes": "more: less padding, more memory and a longer start",
    "max_cudagraph_prompt_tokens": "more: steps with prompts cost the host less, but the start takes longer",
    "attention_split_size": "a fixed size: attention does not depend on the batch, but is slower",
    "tensor_parallel_size": "more: each device has a smaller share of the weights, with two exchanges in each layer",
    "pipeline_parallel_size": "more: each device has fewer layers; a single request is not faster",
    "data_parallel_size": "more: more throughput, with a copy of the weights and the cache for each",
    "enable_expert_parallel": "on: each device has whole experts; their load may be uneven",
    "num_threads": "more than cores: slower",
    "spec_method": "right drafts save steps; drafts that are never right cost a few percent",
    "spec_tokens": "more: faster where text repeats itself, more wrong drafts elsewhere",
    "speculative_config": "right drafts save steps; drafts that are never right cost a few percent",
    "tokenizer_pool_size": "more: more prompts at the same time, each with a core",
    "tokenizer_pool_type": "process: not limited by the interpreter's lock, but each has a copy of the tokenizer",
    "api_server_count": "more: more streams at once; each process needs about 150 MB",
    "resumable_streams": "on: clients can resume broken streams; every stream is written to disk",
    "generation_store_size": "costs this much disk or memory",
    "response_store_size": "costs this much disk",
    "file_store_size": "costs this much disk",
    "otlp_traces_endpoint": "sends a trace of each sampled request in the background",
    "ssl_certfile": "TLS costs some processor time for each connection and chunk",
    "log_level": "debug: the log has a line for each request and step",
    "hang_timeout": "less: hangs end sooner, but slow steps may count as hangs",
    "recovery_timeout": "more: requests survive longer failures, and clients wait longer",
    "trust_request_chat_template": "on: the server runs templates of clients",
}


def phrase(name: str, config: Any, facts: ModelFacts | None) -> str:
    """Returns what the value of a field costs or saves; "" if it does not matter.

    facts: those of the model, if its files are on this machine.
    """
    if name == "generation_config":  # which does not need the model's files
        return _generation_config(config)
    computed = _COMPUTED[name](config, facts) if name in _COMPUTED and facts is not None else ""
    return computed or _PHRASES.get(name, "")


def _generation_config(config: Any) -> str:
    path = local_model(config.model, config.download_dir, config.revision, config.gguf)
    defaults = sampling_defaults(config, path)
    unread = ", unless its files name others" if path is None and config.generation_config == "auto" else ""
    return str(defaults) + (f", from {defaults.source}" if defaults.values else "") + unread


def _max_model_len(config: Any, facts: ModelFacts) -> str:
    length = getattr(config, "max_model_len", None) or facts.max_len
    size = kv_bytes_per_token(config, facts) * length
    return f"{size_text(size)} of KV cache for one request of this length" if size else ""


def _kv_cache_memory_bytes(config: Any, facts: ModelFacts) -> str:
    per_token, total = kv_bytes_per_token(config, facts), getattr(config, "kv_cache_memory_bytes", None)
    if not per_token:
        return ""
    return f"{size_text(per_token)} a token" + (f": {total // per_token:,} tokens" if total else "")


def _kv_cache_dtype(config: Any, facts: ModelFacts) -> str:
    if getattr(config, "kv_cache_dtype", "auto") != SMALLEST or facts.can_be_8_bits:
        return ""
    return "same as auto: this model stores no keys and values that could be fp8"


def _spec_method(config: Any, facts: ModelFacts) -> str:
    if not isinstance(config, ExecutorConfig) or (speculation := Speculation.of(config)) is None:
        return ""
    why_not = drafts.why_not(
        vectors=config.runner == "pooling",
        state=facts.has_state,
        stages=config.pipeline_parallel_size,
        on_cuda=runs_on_cuda(config.device),
    )
    return f"no drafts: {why_not}" if speculation.if_possible and why_not else ""


_COMPUTED: dict[str, Callable[[Any, ModelFacts], str]] = {
    "kv_cache_dtype": _kv_cache_dtype,
    "max_model_len": _max_model_len,
    "spec_method": _spec_method,
    "kv_cache_memory_bytes": _kv_cache_memory_bytes,
}


def kv_bytes_per_token(config: Any, facts: ModelFacts) -> int:
    """Returns the bytes of keys and values of all layers for a token; 0 if they differ between tokens."""
    dtype = getattr(config, "kv_cache_dtype", "auto")
    if dtype == SMALLEST:
        dtype = "fp8" if facts.can_be_8_bits else "auto"
    if dtype == "auto":
        dtype = getattr(config, "dtype", "auto")
    if dtype == "auto":
        dtype = facts.dtype if facts.dtype in ("bfloat16", "float16") else "bfloat16"
    scales = 2 * facts.kv_elements // facts.head_dim if dtype == "int8" and facts.head_dim else 0
    return facts.kv_elements * _BYTES.get(dtype, 2) + scales


def size_text(num_bytes: float) -> str:
    """Returns a size in words, for instance "22.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            return f"{num_bytes:.3g} {unit}" if num_bytes < 1000 else f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    raise AssertionError
