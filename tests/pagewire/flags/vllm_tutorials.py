"""Command lines, files and calls of tutorials that teach vLLM 0.6 to 0.8, as people paste them."""

# Of `vllm serve --help`: every flag, with its values where there is a choice.
USAGE = """\
--model MODEL
--task {auto,generate,embedding,embed,classify,score,reward,transcription}
--tokenizer TOKENIZER
--hf-config-path PATH
--skip-tokenizer-init
--revision REVISION
--code-revision REVISION
--tokenizer-revision REVISION
--tokenizer-mode {auto,slow,mistral,custom}
--trust-remote-code
--allowed-local-media-path PATH
--download-dir DIR
--load-format {auto,pt,safetensors,npcache,dummy,tensorizer,sharded_state,gguf,bitsandbytes,mistral,runai_streamer}
--config-format {auto,hf,mistral}
--dtype {auto,half,float16,bfloat16,float,float32}
--kv-cache-dtype {auto,fp8,fp8_e5m2,fp8_e4m3}
--max-model-len 4096
--guided-decoding-backend xgrammar
--logits-processor-pattern PATTERN
--model-impl {auto,vllm,transformers}
--distributed-executor-backend {ray,mp,uni,external_launcher}
--pipeline-parallel-size 1
--tensor-parallel-size 1
--enable-expert-parallel
--max-parallel-loading-workers 2
--ray-workers-use-nsight
--block-size {8,16,32,64,128}
--enable-prefix-caching
--no-enable-prefix-caching
--disable-sliding-window
--use-v2-block-manager
--num-lookahead-slots 4
--seed 0
--swap-space 4
--cpu-offload-gb 0
--gpu-memory-utilization 0.9
--num-gpu-blocks-override 100
--max-num-batched-tokens 2048
--max-num-partial-prefills 1
--max-long-partial-prefills 1
--long-prefill-token-threshold 0
--max-num-seqs 256
--max-logprobs 20
--disable-log-stats
--quantization {aqlm,awq,deepspeedfp,tpu_int8,fp8,ptpc_fp8,fbgemm_fp8,modelopt,nvfp4,marlin,gguf,gptq_marlin_24,\
gptq_marlin,awq_marlin,gptq,compressed-tensors,bitsandbytes,qqq,hqq,experts_int8,neuron_quant,ipex,quark,moe_wna16,None}
--rope-scaling {"type":"dynamic","factor":2.0}
--rope-theta 1000000
--hf-overrides {"rope_theta":1000000}
--enforce-eager
--max-seq-len-to-capture 8192
--disable-custom-all-reduce
--tokenizer-pool-size {0,4}
--tokenizer-pool-type {ray,thread}
--tokenizer-pool-extra-config {}
--limit-mm-per-prompt image=2
--mm-processor-kwargs {"max_pixels":1003520}
--disable-mm-preprocessor-cache
--enable-lora
--enable-lora-bias
--max-loras 1
--max-lora-rank 16
--lora-extra-vocab-size 256
--lora-dtype {auto,float16,bfloat16}
--long-lora-scaling-factors 4.0
--max-cpu-loras 2
--fully-sharded-loras
--enable-prompt-adapter
--max-prompt-adapters 1
--max-prompt-adapter-token 0
--device {auto,cuda,neuron,cpu,openvino,tpu,xpu,hpu}
--num-scheduler-steps 8
--use-tqdm-on-load
--no-use-tqdm-on-load
--multi-step-stream-outputs {True,False}
--scheduler-delay-factor 0.5
--enable-chunked-prefill {True,False}
--speculative-model [ngram]
--speculative-model-quantization {awq,None}
--num-speculative-tokens 5
--speculative-disable-mqa-scorer
--speculative-draft-tensor-parallel-size 1
--speculative-max-model-len 2048
--speculative-disable-by-batch-size 8
--ngram-prompt-lookup-max 4
--ngram-prompt-lookup-min 1
--spec-decoding-acceptance-method {rejection_sampler,typical_acceptance_sampler}
--typical-acceptance-sampler-posterior-threshold 0.09
--typical-acceptance-sampler-posterior-alpha 0.3
--disable-logprobs-during-spec-decoding {True,False}
--model-loader-extra-config {}
--ignore-patterns original/**/*
--preemption-mode {recompute,swap}
--served-model-name NAME
--qlora-adapter-name-or-path PATH
--show-hidden-metrics-for-version 0.7
--otlp-traces-endpoint http://localhost:4317
--collect-detailed-traces all
--disable-async-output-proc
--scheduling-policy {fcfs,priority}
--scheduler-cls CLASS
--override-neuron-config {}
--override-pooler-config {"pooling_type":"mean"}
--compilation-config 3
--kv-transfer-config {"kv_connector":"PyNcclConnector"}
--worker-cls {auto,CLASS}
--worker-extension-cls CLASS
--generation-config auto
--override-generation-config {"temperature":0.5}
--enable-sleep-mode
--calculate-kv-scales
--additional-config {}
--enable-reasoning
--reasoning-parser {deepseek_r1}
"""

# Command lines -> fields that they set -> flags that a line is said about.
COMMANDS = [
    (
        "python -m vllm.entrypoints.openai.api_server --model meta-llama/Llama-3.1-8B-Instruct"
        " --speculative-model meta-llama/Llama-3.1-1B-Instruct --num-speculative-tokens 5"
        " --speculative-draft-tensor-parallel-size 1 --port 8000",
        {
            "model": "meta-llama/Llama-3.1-8B-Instruct",
            "speculative_model": "meta-llama/Llama-3.1-1B-Instruct",
            "num_speculative_tokens": 5,
            "speculative_draft_tensor_parallel_size": 1,
        },
        [],
    ),
    (
        "python -m vllm.entrypoints.openai.api_server --model m --speculative-model d --num-speculative-tokens 5"
        " --speculative-draft-tp 1 --speculative-max-model-len 2048",
        {"speculative_draft_tensor_parallel_size": 1, "speculative_max_model_len": 2048},
        ["--speculative-draft-tp"],
    ),
    (
        "python -m vllm.entrypoints.openai.api_server --model Qwen/Qwen2.5-7B-Instruct --enforce-eager --port 8000",
        {"model": "Qwen/Qwen2.5-7B-Instruct", "enforce_eager": True},
        [],
    ),
    *(
        (
            "python -m vllm.entrypoints.openai.api_server --model Qwen/Qwen2.5-7B-Instruct"
            f" --attention-backend {backend} --port 8000",
            {"model": "Qwen/Qwen2.5-7B-Instruct"},
            ["--attention-backend"],
        )
        for backend in ("FLASH_ATTN", "XFORMERS", "TORCH_SDPA", "FLASHINFER")
    ),
    (
        "numactl --cpunodebind=0 --membind=0 python -m vllm.entrypoints.openai.api_server"
        " --model Qwen/Qwen2.5-7B-Instruct --port 8000",
        {"model": "Qwen/Qwen2.5-7B-Instruct"},
        [],
    ),
    (
        "taskset -c 0-31 python -m vllm.entrypoints.openai.api_server --model Qwen/Qwen2.5-7B-Instruct --port 8000",
        {"model": "Qwen/Qwen2.5-7B-Instruct"},
        [],
    ),
    ("vllm serve Qwen/Qwen2.5-7B-Instruct", {"model": "Qwen/Qwen2.5-7B-Instruct"}, []),
    ("NCCL_DEBUG=TRACE vllm serve m", {"model": "m"}, []),
    ("vllm serve m --enable-prefix-caching --scheduler-delay-factor 0.01", {}, ["--scheduler-delay-factor"]),
    ("vllm serve m --max-num-seqs 128 --max-model-len 8192", {"max_num_seqs": 128, "max_model_len": 8192}, []),
    ("vllm serve m --speculative-model d --num-speculative-tokens 5", {"num_speculative_tokens": 5}, []),
    ("vllm serve m --quantization awq", {"quantization": "awq"}, []),
    ("vllm serve m --quantization gptq", {"quantization": "gptq"}, []),
    ("vllm serve m --quantization fp8", {"quantization": "fp8"}, []),
    ("vllm serve m --swap-space 4", {"swap_space": 4.0}, []),
    ("vllm serve m --swap-space 8 --max-model-len 4096", {"max_model_len": 4096, "swap_space": 8.0}, []),
    ("vllm serve m --enable-chunked-prefill", {"enable_chunked_prefill": True}, []),
    ("vllm serve m --enable-chunked-prefill --max-num-batched-tokens 512", {"max_num_batched_tokens": 512}, []),
    ("vllm serve m --cpu-offload-gb 4 --enforce-eager", {"enforce_eager": True, "cpu_offload_gb": 4.0}, []),
    (
        "vllm serve m --speculative-model=[ngram] --num-speculative-tokens=4 --use-v2-block-manager"
        " --ngram-prompt-lookup-max=4",
        {"speculative_model": "[ngram]", "num_speculative_tokens": 4, "ngram_prompt_lookup_max": 4},
        ["--use-v2-block-manager"],
    ),
    ("vllm serve m --speculative-mode=[ngram]", {"speculative_model": "[ngram]"}, ["--speculative-mode"]),
    ("vllm serve m --tokenizer-pool-size 4", {"tokenizer_pool_size": 4}, []),
    ("vllm serve m --tensor_parallel_size 1 --tokenizer_pool_size 2", {"tokenizer_pool_size": 2}, []),
    ("vllm serve m --generation-config auto", {"generation_config": "auto"}, []),
    ("vllm serve m --limit-mm-per-prompt image=2", {"limit_mm_per_prompt": "image=2"}, []),
]

# Files for --config -> fields -> keys that a line is said about.
FILES = {
    "online": (
        """\
model: Qwen/Qwen2.5-7B-Instruct
tensor-parallel-size: 1
scheduler-delay-factor: 0.01
max-num-seqs: 64
max-model-len: 8192
enable-prefix-caching: true        # shared system prompt
# speculative-model: meta-llama/Llama-3.1-1B-Instruct
gpu-memory-utilization: 0.90
swap-space: 0
max-num-batched-tokens: 8192
port: 8000
host: 0.0.0.0
dtype: half
""",
        {"max_num_seqs": 64, "max_model_len": 8192, "dtype": "float16", "host": "0.0.0.0", "tensor_parallel_size": 1},
        ["scheduler-delay-factor"],
    ),
    "batch": (
        """\
model: Qwen/Qwen2.5-72B-Instruct
tensor-parallel-size: 4
scheduler-delay-factor: 0.5
max-num-seqs: 256
max-model-len: 16384
quantization: awq
gpu-memory-utilization: 0.95
swap-space: 8
max-num-batched-tokens: 32768
enable-prefix-caching: true
port: 8001
dtype: half
""",
        {"tensor_parallel_size": 4, "quantization": "awq", "gpu_memory_utilization": 0.95, "port": 8001},
        ["scheduler-delay-factor", "--grpc-port is not set, and becomes 8002"],
    ),
    "cost": (
        """\
model: Qwen/Qwen2.5-72B-Instruct
tensor-parallel-size: 2
quantization: awq
dtype: half
gpu-memory-utilization: 0.98
max-num-seqs: 128
max-model-len: 8192
swap-space: 4
speculative-model: Qwen/Qwen2.5-1.5B-Instruct
num-speculative-tokens: 5
port: 8002
enable-prefix-caching: true
""",
        {"speculative_model": "Qwen/Qwen2.5-1.5B-Instruct", "num_speculative_tokens": 5, "max_num_seqs": 128},
        [],
    ),
}

# LLM(...) -> fields.
CALLS = [
    ({"enable_prefix_caching": True}, {"enable_prefix_caching": True}),
    ({"enable_chunked_prefill": True, "max_num_batched_tokens": 2048}, {"max_num_batched_tokens": 2048}),
    ({"max_num_batched_tokens": 16384}, {"max_num_batched_tokens": 16384}),
    (
        {"tensor_parallel_size": 4, "pipeline_parallel_size": 2},
        {"tensor_parallel_size": 4, "pipeline_parallel_size": 2},
    ),
    ({"tensor_parallel_size": 4, "enable_expert_parallel": True}, {"enable_expert_parallel": True}),
    ({"data_parallel_size": 2}, {"data_parallel_size": 2}),
    ({"tokenizer_pool_size": 4}, {"tokenizer_pool_size": 4}),
    ({"quantization": "AWQ"}, {"quantization": "awq"}),
    ({"quantization": "GPTQ"}, {"quantization": "gptq"}),
    ({"gpu_memory_utilization": 0.9}, {"gpu_memory_utilization": 0.9}),
    ({"max_model_len": 2048, "max_num_seqs": 4}, {"max_model_len": 2048, "max_num_seqs": 4}),
    ({"enforce_eager": True}, {"enforce_eager": True}),
    ({"limit_mm_per_prompt": {"image": 2}}, {"limit_mm_per_prompt": '{"image": 2}'}),
    ({"speculative_model": "[ngram]", "num_speculative_tokens": 4}, {"speculative_model": "[ngram]"}),
    ({"disable_log_stats": False, "swap_space": 4, "trust_remote_code": True}, {"disable_log_stats": False}),
]

# Every flag of `vllm serve` 0.33, for a value each where it needs one.
CURRENT = """\
--model m --runner auto --convert auto --tokenizer t --tokenizer-mode auto --trust-remote-code --dtype auto --seed 0
--hf-config-path p --allowed-local-media-path p --allowed-media-domains d --revision r --code-revision r
--tokenizer-revision r --max-model-len 4k --quantization awq --quantization-config {} --allow-deprecated-quantization
--enforce-eager --enable-return-routed-experts --return-sampling-mask --max-logprobs 20 --logprobs-mode raw_logprobs
--use-fp64-gumbel --enable-trace-replay --disable-sliding-window --disable-cascade-attn --skip-tokenizer-init
--enable-prompt-embeds --served-model-name a --config-format auto --hf-token x --hf-overrides {}
--model-class-overrides {} --pooler-config {} --generation-config auto --override-generation-config {}
--enable-sleep-mode --enable-cumem-allocator --enable-nccl-comm-suspend --model-impl auto --logits-processors x
--io-processor-plugin x --renderer-num-workers 2 --load-format auto --download-dir d --safetensors-load-strategy lazy
--safetensors-prefetch-num-threads 4 --safetensors-prefetch-block-size 4 --model-loader-extra-config {}
--ignore-patterns x --use-tqdm-on-load --pt-load-map-location cpu --attention-backend FLASH_ATTN --mamba-backend x
--mamba-ssu-algorithm x --enable-mamba-cache-stochastic-rounding --mamba-cache-philox-rounds 4 --reasoning-parser auto
--reasoning-parser-plugin x --distributed-executor-backend mp --pipeline-parallel-size 1 --master-addr a
--master-port 1 --nnodes 1 --node-rank 0 --distributed-timeout-seconds 9 --cpu-distributed-timeout-seconds 9
--device-ids 0 --tensor-parallel-size 1 --decode-context-parallel-size 1
--dcp-comm-backend x --dcp-q-replicate --dcp-kv-cache-interleave-size 1 --cp-kv-cache-interleave-size 1
--prefill-context-parallel-size 1 --data-parallel-size 1 --data-parallel-rank 0 --data-parallel-start-rank 0
--data-parallel-size-local 1 --data-parallel-address a --data-parallel-rpc-port 1 --data-parallel-backend mp
--data-parallel-hybrid-lb --data-parallel-external-lb --data-parallel-multi-port-external-lb --enable-expert-parallel
--enable-batch-sharded-sampling --enable-ep-weight-filter --all2all-backend x --enable-dbo --ubatch-size 1
--enable-elastic-ep --dbo-decode-token-threshold 1 --dp-sync-interval 1 --dbo-prefill-token-threshold 1
--disable-nccl-for-dp-synchronization --enable-eplb --eplb-config {} --expert-placement-strategy x
--max-parallel-loading-workers 1 --ray-workers-use-nsight --disable-custom-all-reduce --worker-cls auto
--worker-extension-cls x --enable-fault-tolerance --fault-tolerance-config {} --block-size 16
--gpu-memory-utilization 0.92 --kv-cache-memory-bytes 1G --kv-cache-dtype auto --num-gpu-blocks-override 9
--enable-prefix-caching --prefix-caching-hash-algo sha256 --prefix-cache-retention-interval 1
--kv-cache-dtype-skip-layers 0 --kv-sharing-fast-prefill --mamba-cache-dtype auto --mamba-ssm-cache-dtype auto
--mamba-block-size 512 --prefix-match-unit block --mamba-cache-mode align --replayssm-buffer-len 1 --use-replayssm
--kv-offloading-size 4 --kv-offloading-backend native --offload-backend auto --cpu-offload-gb 0
--cpu-offload-params x --offload-group-size 0 --offload-num-in-group 1 --offload-prefetch-step 1 --offload-params x
--language-model-only --limit-mm-per-prompt image=2 --enable-mm-embeds --media-io-kwargs {} --mm-processor-kwargs {}
--mm-processor-cache-gb 4 --mm-processor-cache-type lru --mm-hasher-algorithm blake3
--mm-shm-cache-max-object-size-mb 128 --mm-encoder-only --mm-encoder-tp-mode weights --mm-encoder-attn-backend x
--mm-encoder-attn-dtype auto --mm-encoder-fp8-scale-path x --mm-encoder-fp8-scale-save-path x
--mm-encoder-fp8-scale-save-margin 1 --interleave-mm-strings --skip-mm-profiling --video-pruning-rate 0
--video-pruning-method x --mm-tensor-ipc x --mm-processor-device auto --mm-ipc-gpu-memory-gb 1
--mm-device-do-normalize --enable-lora --max-loras 1 --max-lora-rank 16 --lora-dtype auto
--enable-tower-connector-lora --max-cpu-loras 1 --fully-sharded-loras --lora-target-modules x --default-mm-loras {}
--specialize-active-lora --enable-mixed-moe-lora-format --enable-moe-shared-loras
--show-hidden-metrics-for-version 0.32 --otlp-traces-endpoint http://localhost:4317 --collect-detailed-traces all
--per-request-spec-decode-metrics --kv-cache-metrics --kv-cache-metrics-sample 0.01 --cudagraph-metrics
--enable-layerwise-nvtx-tracing --enable-mfu-metrics --enable-logging-iteration-details --jit-monitor-mode x
--jit-monitor-verbose --max-num-batched-tokens 2k --max-num-scheduled-tokens 2k --max-num-seqs 9
--max-num-queued-reqs 9 --max-num-queued-tokens 9 --long-prefill-token-threshold 0 --scheduling-policy fcfs
--enable-chunked-prefill --disable-chunked-mm-input --scheduler-cls x --scheduler-reserve-full-isl --watermark 0
--prefill-schedule-interval 1 --disable-hybrid-kv-cache-manager --async-scheduling --stream-interval 1
--cudagraph-capture-sizes 1 --max-cudagraph-capture-size 8 --ir-op-priority {} --enable-flashinfer-autotune
--enable-bf16x3-router-gemm --moe-backend auto --linear-backend auto --speculative-config {} --spec-method ngram
--spec-model m --spec-tokens 5 --diffusion-config {} --kv-transfer-config {} --kv-events-config {}
--ec-transfer-config {} --ec-manager-config {} --compilation-config 3 --attention-config {} --reasoning-config {}
--kernel-config {} --additional-config {} --structured-outputs-config {} --profiler-config {} --optimization-level 2
--performance-mode balanced --weight-transfer-config {} --disable-log-stats --aggregate-engine-logging
--fail-on-environ-validation --shutdown-timeout 9 --gdn-prefill-backend triton --kda-prefill-backend triton
--lora-modules a=b --chat-template t --chat-template-content-format auto --trust-request-chat-template
--default-chat-template-kwargs {} --response-role assistant --return-tokens-as-token-ids --enable-auto-tool-choice
--exclude-tools-when-tool-choice-none --tool-call-parser hermes --tool-parser-plugin x --tool-server demo
--log-config-file f --max-log-len 9 --enable-prompt-tokens-details --enable-per-request-metrics
--enable-server-load-tracking --enable-force-include-usage --enable-tokenizer-info-endpoint --enable-log-outputs
--enable-log-deltas --cohere-is-reasoning-model --cohere-format cmd4 --log-error-stack --tokens-only
--fingerprint-mode full --fingerprint-value x --host h --port 1 --data-parallel-supervisor-port 1
--dp-supervisor-probe-interval-s 1 --dp-supervisor-probe-timeout-s 1 --dp-supervisor-probe-failure-threshold 1
--uds s --uvicorn-log-level info --disable-uvicorn-access-log --disable-access-log-for-endpoints /health
--allow-credentials --allowed-origins * --allowed-methods * --allowed-headers * --api-key k --ssl-keyfile f
--ssl-certfile f --ssl-ca-certs f --enable-ssl-refresh --ssl-cert-reqs 0 --ssl-ciphers x --root-path /
--middleware x --enable-request-id-headers --disable-fastapi-docs --h11-max-incomplete-event-size 9
--h11-max-header-count 9 --enable-offline-docs --enable-flash-late-interaction --enable-log-requests --headless
--api-server-count 1 --grpc
"""
