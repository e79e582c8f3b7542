"""What settings cost or save: a phrase each, with bytes where the model's files tell them."""

from collections.abc import Callable
from typing import Any

from pagewire.config.executor import SMALLEST
from pagewire.flags.model_facts import ModelFacts

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1, "fp8_e4m3": 1}

_PHRASES = {
    "max_num_seqs": "more: more tokens a second together, fewer for each; each has buffers whether it runs or not",
    "max_num_batched_tokens": "more: prompts are done sooner; fewer: running requests wait less, and memory for them",
    "target_itl_ms": "less: steadier streams, and first tokens later; 0: prompts first",
    "max_num_partial_prefills": "more: short prompts pass long ones; each gets less of a step",
    "enable_chunked_prefill": "off: running requests wait for whole prompts",
    "enable_prefix_caching": "saves prompts that begin as others did; costs a hash for each block",
    "prefix_cache_sharing": "all: more is found, and found times tell tenants of each other",
    "max_waiting_requests": "more: fewer are refused, and more wait; their prompts are in memory",
    "max_queue_time": "less: those who would wait long are told at once; 0: nobody is",
    "pipeline_depth": "2: the next step is prepared while one runs",
    "scheduling_policy": "priority: low priorities wait, and are preempted first",
    "block_size": "larger: fewer blocks to keep, less of a prompt found in the prefix cache",
    "gpu_memory_utilization": "more: a larger KV cache; too much, and other users of the device have none",
    "kv_cache_dtype": "fp8, smallest: half the memory of keys and values, less exact",
    "num_gpu_blocks_override": "for tests: fewer than fit force preemption",
    "mm_encoder_cache_bytes": "saves encoding an image again; that much memory",
    "grammar_cache_size": "saves compiling a grammar again; some MB each for large ones",
    "dtype": "float32: exact, twice the memory and time of 16 bits",
    "quantization": "4 bits: a quarter of the memory of 16, decode as much faster where memory bounds it, less exact",
    "weights_cache": "saves packing weights at the next start; as much disk as they have",
    "enforce_eager": "on: no graphs to capture and keep, every step launches each kernel",
    "cudagraph_capture_sizes": "more: less padding, more memory and a longer start",
    "max_cudagraph_prompt_tokens": "more: less work for the host where prompts are computed, a longer start",
    "attention_split_size": "a fixed size: attention independent of the batch, slower",
    "tensor_parallel_size": "more: a share of the weights on each device, two exchanges for each layer",
    "pipeline_parallel_size": "more: a share of the layers on each device; one request alone is not faster",
    "data_parallel_size": "more: as many times the throughput, and as many copies of weights and cache",
    "enable_expert_parallel": "on: whole experts on each device, of uneven load",
    "num_threads": "more than cores: slower",
    "spec_method": "saves steps where drafts are right; what never is right costs a few percent",
    "spec_tokens": "more: more at once where text repeats itself, more in vain elsewhere",
    "speculative_config": "saves steps where drafts are right; what never is right costs a few percent",
    "tokenizer_pool_size": "more: prompts beside each other; each a core",
    "tokenizer_pool_type": "process: past the interpreter's lock, a copy of the tokenizer each",
    "api_server_count": "more: more streams at once; about 150 MB each",
    "resumable_streams": "on: broken streams go on, every one is written to disk",
    "generation_store_size": "that much disk, or memory",
    "response_store_size": "that much disk",
    "file_store_size": "that much disk",
    "otlp_traces_endpoint": "a trace for each sampled request, sent in the background",
    "ssl_certfile": "TLS: some processor time for each connection and chunk",
    "log_level": "debug: a line for each request and step",
    "hang_timeout": "less: hangs end sooner; too little, and slow steps are taken for them",
    "recovery_timeout": "more: requests outlive longer failures, and clients wait for it",
    "trust_request_chat_template": "on: clients run templates of theirs here",
}


def phrase(name: str, config: Any, facts: ModelFacts | None) -> str:
    """What the field's value costs or saves, or nothing that matters. facts: of the model, if its files are here."""
    computed = _COMPUTED[name](config, facts) if name in _COMPUTED and facts is not None else ""
    return computed or _PHRASES.get(name, "")


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
    if getattr(config, "kv_cache_dtype", "auto") != SMALLEST or facts.can_be_fp8:
        return ""
    return "as auto: this model stores no keys and values that could be fp8"


def _spec_method(config: Any, facts: ModelFacts) -> str:
    if getattr(config, "spec_method", None) != "auto":
        return ""
    if facts.has_state:
        return "nothing is drafted: layers with a state cannot take drafts back"
    if getattr(config, "pipeline_parallel_size", 1) > 1:
        return "nothing is drafted: with a pipeline of stages, name a --spec-method"
    return "nothing is drafted: vectors need none" if getattr(config, "runner", "") == "pooling" else ""


_COMPUTED: dict[str, Callable[[Any, ModelFacts], str]] = {
    "kv_cache_dtype": _kv_cache_dtype,
    "max_model_len": _max_model_len,
    "spec_method": _spec_method,
    "kv_cache_memory_bytes": _kv_cache_memory_bytes,
}


def kv_bytes_per_token(config: Any, facts: ModelFacts) -> int:
    """Of keys and values of all layers; 0 where that is not the same for each token."""
    dtype = getattr(config, "kv_cache_dtype", "auto")
    if dtype == SMALLEST:
        dtype = "fp8" if facts.can_be_fp8 else "auto"
    if dtype == "auto":
        dtype = getattr(config, "dtype", "auto")
    if dtype == "auto":
        dtype = facts.dtype if facts.dtype in ("bfloat16", "float16") else "bfloat16"
    return facts.kv_elements * _BYTES.get(dtype, 2)


def size_text(num_bytes: float) -> str:
    """As 22.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            return f"{num_bytes:.3g} {unit}" if num_bytes < 1000 else f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    raise AssertionError
