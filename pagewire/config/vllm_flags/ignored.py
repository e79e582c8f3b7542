"""Flags of vLLM that are ignored: without them, clients get the same answers. A row: the flags, and the reason."""

from pagewire.config.vllm_flags.entries import IGNORED, VllmFlag

_IMAGE_CACHE = "embeddings of images are kept for the next prompt with the same image: --mm-encoder-cache-bytes"
NODES = (
    "start processes on several machines with --distributed-executor-backend ray, or one by one with external, --rank"
    " and --leader (docs/scale.md)"
)
REPLICAS = (
    "start replicas on one machine with --data-parallel-size; on several machines, each replica is an executor that the"
    " scheduler finds (--executor-discovery, docs/scale.md)"
)
_ACCESS_LOG = "the log has one line for each request, without prompt and output; --log-level warning leaves it out"

# `name=` takes a value, `name=...` several words, `name` is a switch; letters behind a comma are a short form.
_TABLE = (
    # The model and its files
    (
        "trust-remote-code code-revision=",
        "code in a checkpoint is never run; the model is served if Pagewire or transformers implements its architecture"
        " (docs/models.md)",
    ),
    (
        "skip-tokenizer-init tokens-only",
        "the tokenizer service always runs; send token ids to the scheduler instead: --scheduler-grpc-port",
    ),
    ("ignore-patterns=...", "only the safetensors files and the small files of a model are downloaded"),
    (
        "model-loader-extra-config= pt-load-map-location= safetensors-load-strategy="
        " safetensors-prefetch-num-threads= safetensors-prefetch-block-size=",
        "weights are mapped from their files; `pagewire pull` downloads them beforehand",
    ),
    ("use-tqdm-on-load", "the log shows the progress of loading"),
    ("hf-token=", "set the variable HF_TOKEN, or log in with `hf auth login`"),
    ("disable-sliding-window", "attention uses the windows of the model"),
    ("logits-processor-pattern=", "requests cannot name logits processors"),
    ("allow-deprecated-quantization", "no format is deprecated in Pagewire"),
    (
        "lora-dtype= lora-extra-vocab-size= long-lora-scaling-factors= lora-target-modules= enable-lora-bias"
        " fully-sharded-loras enable-tower-connector-lora specialize-active-lora enable-mixed-moe-lora-format"
        " enable-moe-shared-loras",
        "adapters have the type of the model, are added to every linear layer that they name, and are divided among"
        " ranks as those are; an adapter with anything else is refused when it is loaded",
    ),
    ("max-prompt-adapters= max-prompt-adapter-token=", "prompt adapters are not served"),
    ("media-io-kwargs= mm-processor-device=", "images are read as transformers' processor reads them"),
    ("video-pruning-rate= video-pruning-method=", "videos are not read"),
    (
        "mm-processor-cache-gb= mm-processor-cache-type= mm-shm-cache-max-object-size-mb= mm-hasher-algorithm="
        " mm-tensor-ipc= mm-ipc-gpu-memory-gb= disable-mm-preprocessor-cache",
        _IMAGE_CACHE,
    ),
    ("skip-mm-profiling mm-device-do-normalize", "the start measures the memory that images need"),
    (
        "mm-encoder-attn-dtype= mm-encoder-fp8-scale-path= mm-encoder-fp8-scale-save-path="
        " mm-encoder-fp8-scale-save-margin=",
        "image encoders compute in the dtype of the model",
    ),
    ("override-neuron-config=", "Neuron devices are not supported"),
    ("additional-config=", "Pagewire has no plugins for platforms"),
    # Memory and kernels
    (
        "preemption-mode=",
        "the blocks of a preempted request are loaded again from --kv-offloading-size or --kv-offloading-dir, or"
        " computed again where that is faster",
    ),
    (
        "cpu-offload-params= offload-backend= offload-group-size= offload-num-in-group= offload-prefetch-step="
        " offload-params=",
        "--cpu-offload-gb chooses whole layers, evenly spread, and copies each two layers ahead of its use",
    ),
    ("use-v2-block-manager", "there is only one block manager, with a hash for each block"),
    ("prefix-caching-hash-algo=", "blocks are found by a SHA-256 chain over their tokens"),
    (
        "prefix-match-unit= prefix-cache-retention-interval=",
        "prefixes are matched by whole blocks, and the least recently used blocks are evicted",
    ),
    (
        "mamba-cache-mode= mamba-backend= mamba-ssu-algorithm= mamba-cache-philox-rounds= replayssm-buffer-len="
        " use-replayssm enable-mamba-cache-stochastic-rounding",
        "states are kept every --state-block-size tokens",
    ),
    ("kv-sharing-fast-prefill", "every layer computes its own part of a prompt"),
    ("disable-hybrid-kv-cache-manager", "each kind of layer always has its own group of blocks"),
    (
        "enable-sleep-mode enable-cumem-allocator enable-nccl-comm-suspend",
        "models sleep: POST /sleep, or --idle-timeout",
    ),
    (
        "max-seq-len-to-capture= max-context-len-to-capture=",
        "graphs of decode steps depend on the number of requests: --cudagraph-capture-sizes,"
        " --max-cudagraph-capture-size",
    ),
    (
        "compilation-config=,-O,-cc optimization-level= ir-op-priority=",
        "models are not compiled: kernels are compiled once and kept, and --enforce-eager turns graphs off",
    ),
    (
        "attention-backend= gdn-prefill-backend= kda-prefill-backend= mm-encoder-attn-backend="
        " override-attention-dtype= kernel-config= moe-backend= linear-backend= attention-config=,-ac"
        " disable-cascade-attn",
        "each device has one implementation: Pagewire's C++ kernels on CPUs, its Triton kernels on CUDA",
    ),
    ("enable-flashinfer-autotune", "sizes of tiles come from tables that were made beforehand (kernels/tuning)"),
    ("enable-bf16x3-router-gemm", "routers of experts compute in the dtype of the model"),
    # Scheduling
    (
        "scheduler-delay-factor= prefill-schedule-interval=",
        "each step runs decodes first and fills the rest with prompts, so no request is delayed; --target-itl-ms"
        " limits what prompts may cost decodes",
    ),
    (
        "num-scheduler-steps= multi-step-stream-outputs disable-async-output-proc",
        "the next step is prepared while one runs: --pipeline-depth",
    ),
    ("num-lookahead-slots=", "blocks are reserved as tokens come, drafted tokens included"),
    ("max-num-queued-tokens=", "waiting requests are limited by time: --max-queue-time"),
    ("max-num-active-seqs=", "running requests are limited by --max-num-seqs"),
    ("max-num-scheduled-tokens=", "the tokens of a step are limited by --max-num-batched-tokens"),
    (
        "watermark= scheduler-reserve-full-isl disable-chunked-mm-input",
        "a request starts as soon as there are free blocks for the next tokens that it computes",
    ),
    ("long-prefill-token-threshold-adaptive", "--long-prefill-token-threshold says which prompts are long"),
    ("stream-interval=", "tokens are sent as soon as they are known, those of steps below 5 ms in pairs"),
    # Devices, processes and machines
    ("engine-use-ray disable-frontend-multiprocessing", "every service is always a process of its own"),
    ("max-parallel-loading-workers=", "all processes of a group load at the same time"),
    ("ray-workers-use-nsight", "profile the processes of Ray with your own tools"),
    (
        "disable-nccl-for-dp-synchronization enable-batch-sharded-sampling"
        " distributed-timeout-seconds= cpu-distributed-timeout-seconds= dp-sync-interval=",
        "CUDA devices communicate through NCCL and shared memory, CPUs through shared memory, without these options",
    ),
    ("master-addr= master-port=", NODES),
    (
        "data-parallel-address=,-dpa data-parallel-rpc-port=,-dpp data-parallel-backend=,-dpb"
        " data-parallel-hybrid-lb,-dph data-parallel-external-lb,-dpe data-parallel-multi-port-external-lb,-dpm"
        " data-parallel-supervisor-port= dp-supervisor-probe-interval-s= dp-supervisor-probe-timeout-s="
        " dp-supervisor-probe-failure-threshold=",
        REPLICAS,
    ),
    (
        "enable-eplb enable-elastic-ep enable-ep-weight-filter eplb-log-balancedness eplb-config="
        " num-redundant-experts= eplb-window-size= eplb-step-interval= expert-placement-strategy= all2all-backend=",
        "experts are divided evenly among the devices: --enable-expert-parallel",
    ),
    (
        "enable-dbo dbo-decode-token-threshold= dbo-prefill-token-threshold= ubatch-size=",
        "the stages of a pipeline compute different steps at the same time: --pipeline-parallel-size",
    ),
    (
        "dcp-comm-backend= dcp-kv-cache-interleave-size= cp-kv-cache-interleave-size= dcp-q-replicate"
        " decode-context-parallel-size=,-dcp prefill-context-parallel-size=,-pcp",
        "keys and values are divided among devices by heads, not by tokens: --tensor-parallel-size",
    ),
    (
        "mm-encoder-tp-mode= enable-multimodal-encoder-data-parallel",
        "images are encoded on the devices that hold the first layers",
    ),
    (
        "enable-fault-tolerance fault-tolerance-config=",
        "requests survive the death of every process but the gateway's, and of that with an Idempotency-Key"
        " (docs/reliability.md)",
    ),
    # Speculative decoding
    (
        "typical-acceptance-sampler-posterior-threshold= typical-acceptance-sampler-posterior-alpha=",
        "drafts are accepted by rejection sampling, which keeps the distribution of tokens",
    ),
    ("speculative-disable-mqa-scorer", "one step checks all drafts of a request"),
    ("disable-logprobs-during-spec-decoding", "requests that ask for log probabilities get them with drafts, too"),
    # The API
    (
        "tokenizer-pool-extra-config=",
        "--tokenizer-pool-size and --tokenizer-pool-type are the only options of the pool",
    ),
    ("enable-reasoning", "the parser follows from the chat template, or is named by --reasoning-parser"),
    ("reasoning-config=", "each parser of reasoning knows its own marks"),
    ("sse-keep-alive-interval=", "streams send no comments to stay alive; let a proxy add them"),
    ("fail-on-environ-validation", "a variable that resembles a setting always ends the command"),
    (
        "guided-decoding-backend= guided-decoding-disable-fallback",
        "grammars are compiled by the executor: --grammar-compile-timeout, --grammar-cache-size",
    ),
    (
        "guided-decoding-disable-additional-properties",
        "objects have no properties besides those of their JSON schema, unless --allow-additional-properties is given",
    ),
    ("chat-template-content-format=", "the format follows from the chat template"),
    ("exclude-tools-when-tool-choice-none", "with tool_choice none, the prompt never contains the tools"),
    (
        "enable-prompt-tokens-details enable-request-id-headers enable-server-load-tracking",
        "answers always contain it",
    ),
    ("use-fp64-gumbel", "random numbers come from counters of position and seed"),
    ("enable-offline-docs", "the page at / documents the API and needs no network"),
    ("root-path=", "routes do not depend on it"),
    ("grpc", "gRPC is always served: --grpc-port"),
    ("enable-ssl-refresh", "certificates are always read again when they change"),
    ("h11-max-incomplete-event-size= h11-max-header-count=", "the sizes of headers and bodies are always limited"),
    ("cohere-format= cohere-is-reasoning-model", "Cohere's chat API is not served"),
    ("enable-flash-late-interaction", "the executor computes scores"),
    ("enable-trace-replay", "it serves the development of vLLM"),
    # Logs, metrics and traces
    ("disable-log-requests enable-log-requests enable-log-outputs enable-log-deltas max-log-len=", _ACCESS_LOG),
    ("uvicorn-log-level= disable-access-log-for-endpoints= disable-uvicorn-access-log", _ACCESS_LOG),
    ("aggregate-engine-logging", "the line about the load names each executor, or has their sum if there are many"),
    ("log-config-file= log-error-stack", "--log-level and --log-format configure the log"),
    (
        "show-hidden-metrics-for-version= custom-histogram-buckets= cudagraph-metrics enable-logging-iteration-details",
        "/metrics always has all metrics that there are (docs/operations.md)",
    ),
    ("kv-cache-metrics-sample= kv-cache-metrics", "the lifetime of single blocks is not sampled; /v1/status has them"),
    ("enable-mfu-metrics", "operations are not estimated; pagewire:execute_time_seconds has the times of steps"),
    ("collect-detailed-traces=...", "every trace has the stages of its request: --otlp-traces-endpoint"),
    (
        "profiler-config= jit-monitor-mode= enable-layerwise-nvtx-tracing jit-monitor-verbose",
        "profile with your own tools",
    ),
)


def _entry(flag: str, why: str) -> VllmFlag:
    spelled, *short = flag.split(",")
    name, has_value, words = spelled.partition("=")
    takes = "words" if words else "value" if has_value else "switch"
    return VllmFlag(name, IGNORED, why, takes=takes, short=tuple(short))


FLAGS = [_entry(flag, why) for flags, why in _TABLE for flag in flags.split()]
