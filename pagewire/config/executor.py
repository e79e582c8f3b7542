"""Flags of the executor."""

from dataclasses import dataclass

from pagewire.config.fields import GIB, NOT_NEGATIVE, POSITIVE, POSITIVE_SECONDS, Range, flag
from pagewire.config.parallel import ParallelConfig
from pagewire.config.shared import BatchConfig, ListenConfig, ModelConfigFlags, SeedConfig
from pagewire.config.speculation import SpeculationConfig

# A value of --kv-cache-dtype: the smallest type that the model supports.
SMALLEST = "smallest"
OFFLOADING_DIR_GIB = 10.0


@dataclass(frozen=True, kw_only=True)
class ExecutorConfig(ModelConfigFlags, BatchConfig, ParallelConfig, SpeculationConfig, SeedConfig, ListenConfig):
    """Computes steps of one copy of the model, with its weights and KV cache."""

    listen: str = flag(
        "0.0.0.0:50053",
        "addresses to serve gRPC on, separated by commas: unix:/path or host:port",
        group="network",
    )
    device: str = flag(
        "auto",
        "device that runs the model; auto: CUDA if it is available, else the CPU",
        group="executor",
        choices=("auto", "cpu", "cuda"),
    )
    dtype: str = flag(
        "auto",
        "type of weights, activations and KV cache (see --kv-cache-dtype); auto: that of the checkpoint, bfloat16 for "
        "GGUF",
        group="model",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    load_format: str = flag(
        "auto",
        "format of the weight files; dummy: random weights, made from config.json alone",
        group="model",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    runner: str = flag(
        "auto",
        "what the model generates; generate: text, pooling: vectors, auto: by its architecture and modules.json",
        group="model",
        choices=("auto", "generate", "pooling"),
    )
    convert: str = flag(
        "auto",
        "what --runner pooling returns; embed: embeddings, classify: scores of the classification head",
        group="model",
        choices=("auto", "none", "embed", "classify"),
    )
    quantization: str | None = flag(
        None,
        "required format of the checkpoint; none: dequantize it to --dtype (default: run it as it is stored)",
        group="model",
        choices=(
            "awq",
            "awq_marlin",
            "gptq",
            "gptq_marlin",
            "compressed-tensors",
            "fp8",
            "fbgemm_fp8",
            "gguf",
            "bitsandbytes",
            "mxfp4",
            "none",
        ),
        short="q",
    )
    hf_overrides: str | None = flag(
        None,
        "JSON object with keys that replace those of config.json, at every level",
        group="model",
        kind="json",
    )
    weights_cache: str | None = flag(
        None,
        "directory for weights in the layout of the device, which make the next start quick; auto: in Pagewire's cache "
        "directory (default: none)",
        group="model",
    )
    model_impl: str = flag(
        "auto",
        "implementation of the model; pagewire: its own, transformers: that of transformers with Pagewire's attention, "
        "auto: pagewire if there is one",
        group="model",
        choices=("auto", "pagewire", "transformers"),
    )
    max_model_len: int | None = flag(
        None,
        "longest request in tokens, prompt plus output (default: the length of the model)",
        group="model",
        kind="size",
        valid=Range(minimum=2),
    )
    block_size: int | None = flag(
        None,
        "tokens in a KV block; on CUDA 16 to 128 (default: 64 on Hopper, elsewhere 16)",
        group="memory",
        valid=Range(minimum=8, maximum=256, power_of_two=True),
    )
    state_block_size: int = flag(
        512,
        "tokens between two states that the prefix cache keeps, for layers with a state (Mamba)",
        group="memory",
        valid=Range(minimum=8, maximum=65536, power_of_two=True),
    )
    grammar_compile_timeout: float = flag(
        5.0,
        "longest time to compile the grammar of a request, in seconds; then the request is refused",
        group="executor",
        valid=POSITIVE_SECONDS,
    )
    grammar_cache_size: int = flag(
        256, "maximum number of compiled grammars", group="executor", valid=Range(minimum=1, maximum=1_000_000)
    )
    allow_additional_properties: bool = flag(
        False,
        "let objects of a JSON schema have properties besides those that it lists, where it says nothing of others",
        group="executor",
    )
    batch_invariant: bool = flag(
        False,
        "the same bits for a request whatever it is computed with: batch, chunks, cached prefix, drafts, restarts; on "
        "CPUs, where it takes longer",
        group="executor",
    )
    logprobs_mode: str = flag(
        "raw_logprobs",
        "meaning of log probabilities; raw: of the model, processed: after penalties, temperature, top-p and other "
        "parameters, logits: not normalized",
        group="executor",
        choices=("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"),
    )
    num_gpu_blocks_override: int | None = flag(
        None,
        "number of KV blocks of layers with full attention, regardless of memory; for tests of preemption",
        group="memory",
        valid=POSITIVE,
    )
    gpu_memory_utilization: float = flag(
        0.9,
        "share of the device's memory for weights, activations and KV cache",
        group="memory",
        valid=Range(above=0, maximum=1),
    )
    kv_cache_memory_bytes: int | None = flag(
        None,
        "size of the KV cache; suffixes as in 4GiB (default: as much as fits)",
        group="memory",
        kind="size",
        valid=POSITIVE,
    )
    kv_cache_dtype: str = flag(
        "auto",
        "type of stored keys and values; auto: that of --dtype, int8: half the memory, a scale per token and head, "
        "fp8: fp8_e4m3, half the memory, scaled by the checkpoint's k_scale and v_scale or by 1, smallest: fp8 if the "
        "layers of the model support it, else auto",
        group="memory",
        choices=("auto", "bfloat16", "float16", "int8", "fp8", "fp8_e4m3", SMALLEST),
    )
    cpu_offload_gb: float = flag(
        0.0,
        "GiB of weights, of each device, that stay in host memory and are copied layer by layer ahead of their use, on "
        "CUDA; each step then takes at least as long as their copy",
        group="memory",
        valid=Range(minimum=0),
    )
    kv_offloading_size: float = flag(
        0.0,
        "host memory for copies of KV blocks, in GiB, of all ranks together: blocks that left the cache are loaded "
        "from there where that is faster than to compute them again; an executor that computes prompts for others has "
        "some by default",
        group="memory",
        valid=GIB,
    )
    kv_offloading_dir: str | None = flag(
        None,
        "directory for copies of KV blocks, which are there after a restart; executors of one host may share it",
        group="memory",
    )
    kv_offloading_dir_size: float = flag(
        OFFLOADING_DIR_GIB,
        "size of --kv-offloading-dir, in GiB; the oldest blocks make room for new ones",
        group="memory",
        valid=GIB,
    )
    swap_space: float = flag(
        0.0,
        "as --kv-offloading-size, which takes precedence; at most a quarter of the free memory (vLLM's name: preempted "
        "requests come back from there)",
        group="memory",
        valid=GIB,
    )
    attention_split_size: int = flag(
        0,
        "tokens of context in one split of attention, on CUDA; a fixed size makes attention bitwise independent of the "
        "rest of the batch, 0: chosen for each step (faster)",
        group="executor",
        kind="size",
        valid=Range(minimum=0, multiple_of=64),
    )
    enforce_eager: bool = flag(
        False,
        "turn off CUDA graphs, or recorded steps on a CPU; every step then launches its kernels one by one: slower, "
        "but without the memory and the start time of graphs",
        group="executor",
    )
    cudagraph_capture_sizes: tuple[int, ...] | None = flag(
        None,
        "numbers of requests for which decode steps are captured as CUDA graphs; other steps are padded to the next "
        "number (default: 1, 2, 4, multiples of 8 to 256, then of 16, to --max-cudagraph-capture-size)",
        group="executor",
        valid=POSITIVE,
    )
    max_cudagraph_capture_size: int | None = flag(
        None,
        "largest captured decode step in requests; larger steps run eagerly (default: --max-num-seqs, at most 512)",
        group="executor",
        valid=POSITIVE,
    )
    max_cudagraph_prompt_tokens: int | None = flag(
        None,
        "largest captured step with prompts, in tokens; larger steps run eagerly, 0: all of them (default: 2048; more "
        "helps small models)",
        group="executor",
        valid=NOT_NEGATIVE,
    )
    enable_lora: bool = flag(
        False,
        "serve adapters (LoRA) of the model: requests name them as their model; PEFT's folders, or GGUF",
        group="adapters",
    )
    lora_modules: str | None = flag(
        None,
        'adapters that are there from the start: NAME=PATH ..., or JSON objects with "name", "path" and perhaps '
        '"base_model_name"',
        group="adapters",
        takes="words",
    )
    max_loras: int = flag(
        4,
        "adapters that requests of one step may have; each takes memory of the device",
        group="adapters",
        valid=Range(minimum=1, maximum=1024),
    )
    max_lora_rank: int = flag(16, "largest rank of an adapter", group="adapters", valid=Range(minimum=1, maximum=1024))
    lora_experts: bool = flag(
        False,
        "reserve memory for adapters of a mixture's experts; --lora-modules with such adapters do so as well",
        group="adapters",
    )
    max_cpu_loras: int | None = flag(
        None,
        "adapters that stay in host memory; others are read again when a request names them, and for one that waits "
        "when there is room (default: all)",
        group="adapters",
        valid=POSITIVE,
    )
    lora_dir: str | None = flag(
        None, "directory of adapters that requests may name; what changes in it is noticed", group="adapters"
    )
    role: str = flag(
        "both",
        "part of this executor among several; prefill: computes prompts and hands them over, decode: "
        "continues them, both: a request stays where it begins",
        group="executor",
        choices=("both", "prefill", "decode"),
    )
    kv_transfer_config: str | None = flag(
        None,
        "the role as vLLM spells it: JSON object with kv_role kv_producer (prefill), kv_consumer (decode) or kv_both",
        group="executor",
        kind="json",
    )
    num_threads: int | None = flag(
        None,
        "threads that compute on a CPU (default: the cores that the process may use)",
        group="executor",
        valid=Range(minimum=1, maximum=1024),
    )
    numa_bind: str | None = flag(
        None,
        "NUMA node of the executor's processors and memory; several executors take the nodes of a list in turns (0,1), "
        "or with auto all nodes (default: not bound)",
        group="executor",
    )
    cpu_share: float = flag(
        1.0,
        "share of this machine's cores for this executor and, on a CPU, of its memory for the KV cache; other flags "
        "take precedence",
        group="executor",
        valid=Range(above=0, maximum=1),
    )
    memory_share: float = flag(
        1.0,
        "as --cpu-share, of memory alone; both count",
        group="executor",
        valid=Range(above=0, maximum=1),
    )
    mm_encoder_cache_bytes: int = flag(
        256 * 1024**2,
        "memory for embeddings of images, which prompts with the same image share; suffixes as in 1GiB",
        group="memory",
        kind="size",
        valid=NOT_NEGATIVE,
    )
    fault_injection: str | None = flag(
        None,
        "for tests: token ids of prompts that make steps fail, as ID:KIND[@OUTPUT],...; KIND: raise, nan, illegal, "
        "device, hang, exit; @OUTPUT: from this many output tokens on",
        group="executor",
    )
