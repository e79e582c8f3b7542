"""Flags about memory: the KV cache, swapping and offloading, graphs."""

from pagewire.config.legacy.entries import becomes, ignored, refused

_RECOMPUTED = (
    "a preempted request is computed again, mostly from the prefix cache; give the cache more room with"
    " --kv-cache-memory-bytes, or half its size with --kv-cache-dtype fp8"
)
_NO_OFFLOAD = (
    "nothing is moved to the memory of the host; if the model does not fit, serve it quantized, or on several devices"
    " with --tensor-parallel-size"
)
_GRAPHS = "decode steps are captured by the number of requests: --cudagraph-capture-sizes, --max-cudagraph-capture-size"
_COMPILED = "nothing is compiled at the start: kernels are compiled once, and graphs are --enforce-eager's opposite"

FLAGS = [
    becomes("device-memory-utilization", "gpu_memory_utilization"),
    becomes("kv-cache-memory", "kv_cache_memory_bytes"),
    becomes("mamba-block-size", "state_block_size"),
    becomes("cuda-graph-sizes", "cudagraph_capture_sizes", takes="words"),
    *ignored(_RECOMPUTED, "swap-space", "preemption-mode"),
    *ignored(
        _NO_OFFLOAD,
        "cpu-offload-gb",
        "cpu-offload-params",
        "offload-backend",
        "offload-group-size",
        "offload-num-in-group",
        "offload-prefetch-step",
        "offload-params",
    ),
    *ignored(
        "the KV cache is in the memory of the device; what does not fit is computed again",
        "kv-offloading-size",
        "kv-offloading-backend",
    ),
    *ignored("there is one block manager, with a hash for each block", "use-v2-block-manager", takes="switch"),
    *refused(
        "scales of an fp8 cache are the checkpoint's k_scale and v_scale, or 1", "calculate-kv-scales", takes="switch"
    ),
    *refused("all layers store keys and values in the same type", "kv-cache-dtype-skip-layers", takes="words"),
    *ignored("blocks are found by a SHA-256 chain of their tokens", "prefix-caching-hash-algo"),
    *ignored(
        "prefixes are found by whole blocks, and the oldest make room",
        "prefix-match-unit",
        "prefix-cache-retention-interval",
    ),
    *refused(
        "states are kept as the model's dtype says", "mamba-cache-dtype", "mamba-ssm-cache-dtype", harmless=("auto",)
    ),
    *ignored(
        "states are kept every --state-block-size tokens",
        "mamba-cache-mode",
        "mamba-backend",
        "mamba-ssu-algorithm",
        "mamba-cache-philox-rounds",
        "replayssm-buffer-len",
    ),
    *ignored(
        "states are kept every --state-block-size tokens",
        "use-replayssm",
        "enable-mamba-cache-stochastic-rounding",
        takes="switch",
    ),
    *ignored("every layer computes its own part of a prompt", "kv-sharing-fast-prefill", takes="switch"),
    *ignored(
        "layers of each kind have a group of blocks of their own", "disable-hybrid-kv-cache-manager", takes="switch"
    ),
    *ignored(
        "memory is not given back while nothing runs; end the executor, and start it again (--weights-cache makes that"
        " quick)",
        "enable-sleep-mode",
        "enable-cumem-allocator",
        "enable-nccl-comm-suspend",
        takes="switch",
    ),
    *ignored(_GRAPHS, "max-seq-len-to-capture", "max-context-len-to-capture"),
    *ignored(_COMPILED, "compilation-config", short=("-O", "-cc")),
    *ignored(_COMPILED, "optimization-level", "ir-op-priority"),
    *ignored(
        "each device has one implementation of attention: Pagewire's C++ on CPUs, its Triton kernels on CUDA",
        "attention-backend",
        "gdn-prefill-backend",
        "kda-prefill-backend",
        "mm-encoder-attn-backend",
        "override-attention-dtype",
        "kernel-config",
        "moe-backend",
        "linear-backend",
    ),
    *ignored(
        "each device has one implementation of attention: Pagewire's C++ on CPUs, its Triton kernels on CUDA",
        "attention-config",
        short=("-ac",),
    ),
    *ignored(
        "tiles of kernels are chosen from measured tables",
        "enable-flashinfer-autotune",
        "enable-bf16x3-router-gemm",
        takes="switch",
    ),
    *ignored("attention has one implementation for each device", "disable-cascade-attn", takes="switch"),
]
