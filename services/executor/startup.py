"""From a configuration to a model runner that is warm: load, size the KV cache, run once. On the device thread."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

import kernels
from pagewire.config import ExecutorConfig
from pagewire.errors import StartupError
from pagewire.process import usable_cores
from services.executor import kv_cache, memory, stats
from services.executor.loader import Model, load_model
from services.executor.model_runner import Limits, ModelRunner
from services.executor.step import MAX_LOGPROBS, RowSampling

logger = logging.getLogger(__name__)

# Everything that a sampled token may cost memory for.
_COSTLY_SAMPLING = RowSampling(
    top_k=50, top_p=0.9, repetition_penalty=1.1, frequency_penalty=0.1, logit_bias=((0, 1.0),), logprobs=MAX_LOGPROBS
)

Progress = Callable[[float, str], None]


@dataclass(frozen=True)
class ExecutorInfo:
    """What was found out at start; `Describe` tells it."""

    incarnation: int
    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    device: str
    dtype: str
    weight_bytes: int
    kv_cache_bytes: int


def resolve_device(name: str) -> torch.device:
    """Raises StartupError if CUDA is asked for and absent."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise StartupError("--device cuda: torch finds no CUDA device here; use --device cpu, or a CUDA build of torch")
    return torch.device("cuda", torch.cuda.current_device())


def start_runner(config: ExecutorConfig, model_path: str, progress: Progress) -> tuple[ModelRunner, ExecutorInfo]:
    """Loads the model and makes it ready. Call it on the thread that will execute steps.

    model_path is where the files of `config.model` are. Raises StartupError (also for what does not fit into memory) or
    ModelLoadError.
    """
    device = resolve_device(config.device)
    # The number of OpenMP threads belongs to the thread that sets it.
    torch.set_num_threads(config.num_threads or usable_cores())
    with _phase("weights"):
        model = load_model(
            model_path,
            dtype=config.dtype,
            device=device,
            load_format=config.load_format,
            model_impl=config.model_impl,
            max_model_len=config.max_model_len,
            seed=config.seed,
            progress=progress,
        )
    if device.type == "cpu":
        stats.CPU_BACKEND.labels(kernels.cpu_backend()).set(1)
    limits = _limits(config, model, device)
    progress(1.0, "KV cache")
    with _phase("kv_cache"):
        num_blocks = _num_blocks(config, model, limits, device)
        runner = ModelRunner(model, _within(limits, num_blocks), num_blocks, device)
    progress(1.0, "warm-up")
    with _phase("warm_up"):
        _warm_up(runner, device)
    info = _describe(config, model, runner, device)
    stats.WEIGHT_BYTES.set(info.weight_bytes)
    stats.KV_CACHE_BYTES.set(info.kv_cache_bytes)
    return runner, info


def _limits(config: ExecutorConfig, model: Model, device: torch.device) -> Limits:
    on_cpu = device.type == "cpu"
    return Limits(
        max_num_seqs=config.max_num_seqs or (128 if on_cpu else 256),
        max_num_batched_tokens=config.max_num_batched_tokens or (2048 if on_cpu else 8192),
        max_model_len=config.max_model_len or model.config.max_position_embeddings,
        block_size=config.block_size,
    )


def _within(limits: Limits, num_blocks: int) -> Limits:
    """A pool that was made small on purpose bounds the longest request too."""
    return replace(limits, max_model_len=min(limits.max_model_len, num_blocks * limits.block_size))


def _num_blocks(config: ExecutorConfig, model: Model, limits: Limits, device: torch.device) -> int:
    bytes_per_block = kv_cache.block_bytes(model, limits.block_size)
    if config.num_gpu_blocks_override is not None:
        num_bytes = config.num_gpu_blocks_override * bytes_per_block
        memory.check_kv_cache_fits(num_bytes, device, "--num-gpu-blocks-override")
        return config.num_gpu_blocks_override
    if config.kv_cache_memory_bytes is not None:
        num_bytes = config.kv_cache_memory_bytes
        memory.check_kv_cache_fits(num_bytes, device, "--kv-cache-memory-bytes")
    elif device.type == "cpu":
        max_tokens = limits.max_num_seqs * limits.max_model_len
        num_bytes = kv_cache.default_cpu_bytes(
            memory.available_cpu_bytes(), bytes_per_block, limits.block_size, max_tokens
        )
    else:
        num_bytes = kv_cache.available_cuda_bytes(
            device, config.gpu_memory_utilization, _profile_peak_bytes(model, limits, device)
        )
    return kv_cache.blocks_within(num_bytes, bytes_per_block, limits.block_size, limits.max_model_len)


def _profile_peak_bytes(model: Model, limits: Limits, device: torch.device) -> int:
    """Device memory at the peak of the largest step there can be, weights included, KV cache (almost) not."""
    torch.cuda.reset_peak_memory_stats(device)
    profile_run(ModelRunner(model, limits, 1, device))
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    return peak


def profile_run(runner: ModelRunner) -> None:
    """The largest step there can be: all rows and tokens, every feature of the sampler, a request of full length."""
    limits = runner.limits
    runner.dummy_run(
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        context_len=limits.max_model_len,
        sampling=_COSTLY_SAMPLING,
    )


def _warm_up(runner: ModelRunner, device: torch.device) -> None:
    """Compiles and faults in what the first request would otherwise wait for: a prefill and a decode step."""
    num_reqs, num_tokens = (2, 32) if device.type == "cpu" else (8, runner.limits.max_num_batched_tokens)
    runner.dummy_run(num_reqs, num_tokens)
    runner.dummy_run(num_reqs, num_reqs)


def _describe(config: ExecutorConfig, model: Model, runner: ModelRunner, device: torch.device) -> ExecutorInfo:
    limits = runner.limits
    name = str(device) if device.type == "cpu" else f"{device} {torch.cuda.get_device_name(device)}"
    return ExecutorInfo(
        incarnation=secrets.randbits(64),
        model=config.model,
        max_model_len=limits.max_model_len,
        vocab_size=model.config.vocab_size,
        eos_token_ids=model.config.eos_token_ids,
        num_blocks=runner.num_blocks,
        block_size=limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        device=name,
        dtype=str(model.config.dtype).removeprefix("torch."),
        weight_bytes=model.weight_bytes,
        kv_cache_bytes=runner.num_blocks * kv_cache.block_bytes(model, limits.block_size),
    )


@contextmanager
def _phase(name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds = time.perf_counter() - started
    stats.LOAD_SECONDS.labels(name).set(seconds)
    logger.info("%s ready in %.2f s", name.replace("_", " "), seconds)
