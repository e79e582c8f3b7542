"""The values of flags of the executor that a configuration alone does not check: each function returns the sentence of
a refusal, or None. Commands call them with what they know, the executor with what it has found."""

import platform
from collections.abc import Sequence

from pagewire.config.executor import ExecutorConfig

# Block sizes that the CUDA attention kernels are compiled and tuned for; the CPU's take any.
_CUDA_BLOCK_SIZES = (16, 32, 64, 128)
# Tokens of a block where they are not set: from this compute capability on, prompts are read by whole blocks, which
# have to hold a tile of keys.
_BLOCK_SIZE, _LARGE_BLOCK_SIZE, _LARGE_BLOCKS_FROM = 16, 64, 9
# (max_num_seqs, max_num_batched_tokens) where they are not set.
_ON_CPU, _ON_CUDA = (128, 2048), (256, 8192)
_TRANSFORMERS = "or use one of Pagewire's own models (docs/models.md) without --model-impl transformers"


def step_limits(config: ExecutorConfig, *, on_cuda: bool) -> tuple[int, int]:
    """Returns max_num_seqs and max_num_batched_tokens."""
    default = _ON_CUDA if on_cuda else _ON_CPU
    return config.max_num_seqs or default[0], config.max_num_batched_tokens or default[1]


def block_size(config: ExecutorConfig, cuda_capability: float = 0.0) -> int:
    """Returns the tokens of a block. cuda_capability: of the device, 9.0 for Hopper; 0 for a CPU."""
    if config.block_size is not None:
        return config.block_size
    fits = config.state_block_size % _LARGE_BLOCK_SIZE == 0
    return _LARGE_BLOCK_SIZE if fits and cuda_capability >= _LARGE_BLOCKS_FROM else _BLOCK_SIZE


def of_cuda_blocks(block_size: int) -> str | None:
    if block_size in _CUDA_BLOCK_SIZES:
        return None
    sizes = ", ".join(map(str, _CUDA_BLOCK_SIZES))
    return f"--block-size {block_size}: the CUDA kernels take {sizes}; use one of them"


def of_capture_sizes(sizes: Sequence[int] | None, max_size: int | None, max_num_reqs: int) -> str | None:
    """Refuses sizes that no step reaches, and flags that contradict each other. max_num_reqs: of a decode step."""
    largest = max(sizes) if sizes else max_size
    flag = "--cudagraph-capture-sizes" if sizes else "--max-cudagraph-capture-size"
    if largest is not None and largest > max_num_reqs:
        return (
            f"{flag} {largest}: a step has at most {max_num_reqs} requests (--max-num-seqs, --max-num-batched-tokens); "
            "lower it"
        )
    if sizes and max_size is not None and max_size != largest:
        return (
            f"--max-cudagraph-capture-size {max_size} contradicts --cudagraph-capture-sizes with a largest "
            f"size of {largest}; give one of the two flags"
        )
    return None


def of_batches_off_cpu() -> str:
    """Refuses --batch-invariant where the C++ kernels do not compute."""
    return (
        "--batch-invariant: only the C++ kernels of CPUs compute a token alike in every batch, and this "
        "executor does not use them; leave it out, or serve with --device cpu"
    )


def of_batches(dtype: str) -> str | None:
    """Refuses --batch-invariant on a CPU for a dtype with products that depend on the batch."""
    if dtype == "float32" or (dtype == "bfloat16" and platform.machine() in ("x86_64", "AMD64")):
        return None
    return (
        f"--batch-invariant: on this processor, products of {dtype} depend on the batch; use --dtype bfloat16 on "
        "x86, or --dtype float32"
    )


def of_conversion(convert: str) -> str | None:
    """Refuses vectors of a model that generates."""
    if convert in ("auto", "none"):
        return None
    return f"--convert {convert}: not with --runner generate; add --runner pooling"


def of_lone_experts(ranks: int) -> str | None:
    if ranks > 1:
        return None
    return (
        "--enable-expert-parallel divides experts among devices, and --tensor-parallel-size is 1: say how many "
        "devices there are, or leave it out"
    )


def of_division(architecture: str, ranks: int, stages: int) -> str | None:
    """Refuses to divide a model in transformers' code."""
    if ranks > 1:
        size, what = f"--tensor-parallel-size {ranks}", "split"
    elif stages > 1:
        size, what = f"--pipeline-parallel-size {stages}", "divided"
    else:
        return None
    return (
        f"{size}: {architecture} runs in transformers' code, which is not {what}; leave the flag out, {_TRANSFORMERS}"
    )


def of_dense(quantization: str | None, architecture: str) -> str | None:
    """Refuses a quantized model in transformers' code."""
    if quantization in (None, "none"):
        return None
    return (
        f"--quantization {quantization}: {architecture} runs in transformers' code, with dense weights only; "
        f"leave the flag out, {_TRANSFORMERS}"
    )


def of_stages(stages: int, layers: int) -> str | None:
    if stages <= layers:
        return None
    return f"--pipeline-parallel-size {stages}: the model has {layers} layers, and a stage needs one; lower it"


def of_overrides(path: object) -> str:
    """Refuses --hf-overrides for a .gguf file."""
    return f"{path}: --hf-overrides: a .gguf file has no config.json; leave the flag out"


def of_load_format(path: object, load_format: str) -> str:
    """Refuses files of another format."""
    return f"{path}: --load-format {load_format} needs a directory with config.json, or a .gguf file"


def of_classes(architecture: str) -> str:
    """Refuses --convert classify for a model without the head for it."""
    return f"--convert classify: {architecture} has no classification head; use --convert embed"


def of_cluster(address: str | None) -> str | None:
    """Refuses an address, of --ray-address or RAY_ADDRESS, at which there is only a Ray client."""
    if not (address or "").startswith("ray://"):
        return None
    return (
        f"--ray-address {address}: executors are reached directly, not through a Ray client: serve on a machine of "
        "the cluster (`ray start --address`), and use HOST:PORT of its head"
    )
