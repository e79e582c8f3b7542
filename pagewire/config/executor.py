"""Flags of the executor."""

from dataclasses import dataclass

from pagewire.config.fields import NOT_NEGATIVE, POSITIVE, Range, flag
from pagewire.config.parallel import ParallelConfig
from pagewire.config.shared import BatchConfig, ListenConfig, ModelConfigFlags
from pagewire.config.speculation import SpeculationConfig

# Of --kv-cache-dtype: whatever the model can have.
SMALLEST = "smallest"


@dataclass(frozen=True, kw_only=True)
class ExecutorConfig(ModelConfigFlags, BatchConfig, ParallelConfig, SpeculationConfig, ListenConfig):
    """One copy of the model: weights, KV cache, steps."""

    listen: str = flag(
        "0.0.0.0:50053",
        "addresses to serve gRPC on, comma separated: unix:/path or host:port",
        group="network",
    )
    device: str = flag(
        "auto",
        "device that runs the model; auto uses CUDA if available",
        group="executor",
        choices=("auto", "cpu", "cuda"),
    )
    dtype: str = flag(
        "auto",
        "type of weights, activations and KV cache (see --kv-cache-dtype); auto: the checkpoint's, bfloat16 for GGUF",
        group="model",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    load_format: str = flag(
        "auto",
        "how weights are stored; dummy = random weights from the config alone",
        group="model",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    runner: str = flag(
        "auto",
        "what the model is served for: generate = text, pooling = vectors; auto: by its architecture and modules.json",
        group="model",
        choices=("auto", "generate", "pooling"),
    )
    convert: str = flag(
        "auto",
        "what --runner pooling yields: embed = embeddings, classify = scores of its classification head",
        group="model",
        choices=("auto", "none", "embed", "classify"),
    )
    quantization: str | None = flag(
        None,
        "require a checkpoint in this format; none = dequantize to --dtype (default: run it as stored)",
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
        "JSON object that is put over the keys of config.json, at every level",
        group="model",
        kind="json",
    )
    weights_cache: str | None = flag(
        None,
        "directory for weights in the layout of the device, which the next start maps; auto = in Pagewire's cache "
        "directory (default: keep none)",
        group="model",
    )
    model_impl: str = flag(
        "auto",
        "Pagewire's own model code, or transformers' with Pagewire's attention; auto prefers the former",
        group="model",
        choices=("auto", "pagewire", "transformers"),
    )
    max_model_len: int | None = flag(
        None,
        "longest request, prompt plus output, tokens (default: the model's)",
        group="model",
        kind="size",
        valid=Range(minimum=2),
    )
    block_size: int = flag(
        16,
        "tokens per KV block; on CUDA 16 to 128",
        group="memory",
        valid=Range(minimum=8, maximum=256, power_of_two=True),
    )
    state_block_size: int = flag(
        512,
        "tokens between the states that the prefix cache keeps of layers with a state (Mamba); the default suits most",
        group="memory",
        valid=Range(minimum=8, maximum=65536, power_of_two=True),
    )
    grammar_compile_timeout: float = flag(
        5.0,
        "seconds that compiling the grammar of a request may take; one that takes longer is refused",
        group="executor",
        valid=Range(above=0),
    )
    grammar_cache_size: int = flag(256, "compiled grammars that are kept", group="executor", valid=POSITIVE)
    logprobs_mode: str = flag(
        "raw_logprobs",
        "what log probabilities are: raw = as the model gives them, processed = as tokens are drawn, with penalties, "
        "temperature, top-p and all else; logits = before they are normalized",
        group="executor",
        choices=("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"),
    )
    num_gpu_blocks_override: int | None = flag(
        None,
        "number of KV blocks of layers that see all tokens, regardless of memory (lets tests force preemption)",
        group="memory",
        valid=POSITIVE,
    )
    gpu_memory_utilization: float = flag(
        0.9,
        "share of device memory for weights, activations and KV cache together",
        group="memory",
        valid=Range(above=0, maximum=1),
    )
    kv_cache_memory_bytes: int | None = flag(
        None,
        "size of the KV cache; suffixes as in 4GiB (default: what fits)",
        group="memory",
        kind="size",
        valid=POSITIVE,
    )
    kv_cache_dtype: str = flag(
        "auto",
        "type of stored keys and values; auto = same as --dtype; fp8 = fp8_e4m3, half the memory, scaled by the "
        "checkpoint's k_scale and v_scale, or by 1; smallest = fp8 if the model's layers can have it, else auto",
        group="memory",
        choices=("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", SMALLEST),
    )
    attention_split_size: int = flag(
        0,
        "tokens of context that one attention split reduces, on CUDA; a fixed size makes attention bitwise independent "
        "of the rest of the batch, 0 chooses by the lengths of each step (faster)",
        group="executor",
        kind="size",
        valid=Range(minimum=0, multiple_of=64),
    )
    enforce_eager: bool = flag(
        False,
        "turn off CUDA graphs, and recorded steps on a CPU: every step launches its kernels one by one "
        "(slower; saves the memory of graphs and the time to capture them)",
        group="executor",
    )
    cudagraph_capture_sizes: tuple[int, ...] | None = flag(
        None,
        "numbers of requests for which decode steps are captured as CUDA graphs; smaller steps are padded to the next "
        "(default: 1, 2, 4, multiples of 8 to 256, of 16 beyond, to --max-cudagraph-capture-size)",
        group="executor",
        valid=POSITIVE,
    )
    max_cudagraph_capture_size: int | None = flag(
        None,
        "largest captured decode step, in requests; larger ones run eagerly (default: --max-num-seqs, at most 512)",
        group="executor",
        valid=POSITIVE,
    )
    max_cudagraph_prompt_tokens: int | None = flag(
        None,
        "largest step with prompts that is captured, in tokens; larger ones run eagerly, 0: all of them "
        "(default: 2048; more helps small models)",
        group="executor",
        valid=NOT_NEGATIVE,
    )
    num_threads: int | None = flag(
        None,
        "CPU threads that compute (default: the cores this process may use)",
        group="executor",
        valid=Range(minimum=1, maximum=1024),
    )
    numa_bind: str | None = flag(
        None,
        "NUMA node whose processors and memory an executor uses; with several executors one for each as 0,1, in turns, "
        "or auto: the nodes there are (default: not bound)",
        group="executor",
    )
    cpu_share: float = flag(
        1.0,
        "share of this machine's cores and, for the KV cache of a CPU, of its memory that this executor takes where "
        "nothing else is said, as several run here",
        group="executor",
        valid=Range(above=0, maximum=1),
    )
    mm_encoder_cache_bytes: int = flag(
        256 * 1024**2,
        "memory for embeddings of images, which the next prompt with the same image finds; suffixes as in 1GiB",
        group="memory",
        kind="size",
        valid=NOT_NEGATIVE,
    )
    seed: int = flag(0, "seed of dummy weights", group="executor")
    fault_injection: str | None = flag(
        None,
        "for tests: token ids that make a step fail when a prompt has them, as ID:KIND[@OUTPUT],...; KIND: raise, nan, "
        "illegal, device, hang, exit; @OUTPUT: from so many tokens of output on",
        group="executor",
    )
