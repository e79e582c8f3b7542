"""Compares the model with the available memory, by the executor's own arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pagewire.config import ExecutorConfig, ServeConfig
from pagewire.config.values.executor import block_size
from pagewire.errors import StartupError
from pagewire.files import models
from pagewire.files.models import check_name
from pagewire.files.wheel_models import WHEEL_MODELS
from pagewire.flags.model_advice import smaller_weights
from pagewire.flags.model_facts import facts_of
from pagewire.tools.doctor.finding import Finding, Findings, absent, note, ok, problem
from pagewire.tools.doctor.gpu import gpus
from pagewire.tools.doctor.host import Host, size

if TYPE_CHECKING:
    from pagewire.services.executor.loading.footprint import Footprint
    from pagewire.services.executor.step.limits import Limits

# The memory of a GPU for activations, graphs and libraries: an executor measures it at its start, here it is a guess.
_GPU_OVERHEAD = 0.06
_LENGTHS = (1024, 4096, 16384, 65536)


def local_model(config: ServeConfig) -> Path | None:
    """Returns the model's files if they are on this machine, without a download. Raises ModelNotFoundError for an
    invalid name."""
    if config.model not in WHEEL_MODELS:
        check_name(config.model, gguf=config.gguf)
    return models.local_model(config.model, config.download_dir, config.revision, config.gguf)


def check_model(host: Host, config: ServeConfig, model: Path | None) -> Findings:
    if model is None:
        yield absent("model", f"{config.model} is not on this machine yet (pagewire pull {config.model})")
        return
    try:
        import torch  # noqa: F401
    except ImportError:
        yield absent("model", "torch is not installed here: pip install 'pagewire[executor]'")
        return
    yield from _fit(host, config.part(ExecutorConfig), model)


def _fit(host: Host, config: ExecutorConfig, path: Path) -> Iterator[Finding]:
    from pagewire.services.executor.batch import kv_cache
    from pagewire.services.executor.device import memory
    from pagewire.services.executor.loading.footprint import footprint
    from pagewire.services.executor.step.limits import Limits

    try:
        own = footprint(config, path)
    except StartupError as error:
        yield problem("model", str(error), "the executor ends at start", "see the message")
        return
    if own is None:
        yield note("model", f"{config.model} runs in transformers' code", "its memory is known once it is loaded")
        return
    seen = gpus(host) if config.device != "cpu" else []
    rows = config.max_num_seqs or (256 if seen else 128)
    tokens = config.max_num_batched_tokens or (8192 if seen else 2048)
    length = config.max_model_len or own.model.config.max_position_embeddings
    capability = (seen[0].number("compute_cap") or 0.0) if seen else 0.0
    limits = Limits(rows, tokens, length, block_size(config, capability), config.state_block_size)
    ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    offloaded = own.offloaded_bytes // ranks if seen else 0
    weights = own.weight_bytes // ranks - offloaded
    usable = own.cache_bytes(rows * length, limits)
    if seen:
        total = (seen[0].number("memory.total") or 0) * 2**20
        room = int(total * (config.gpu_memory_utilization - _GPU_OVERHEAD)) - weights
        where = f"{seen[0].text('name')}, {size(total)}"
    else:
        room = kv_cache.default_cpu_bytes(max(0, memory.available_cpu_bytes() - weights), usable, config.cpu_share)
        where = f"{size(memory.available_cpu_bytes())} of memory"
    cache = config.kv_cache_memory_bytes or room
    dtype = str(own.model.config.dtype).removeprefix("torch.")
    found = f"{size(weights)} of weights ({own.model.config.architecture}, {dtype}"
    found += f", a {ranks}th on each device) in {where}" if ranks > 1 else f") in {where}"
    found += f", without {size(offloaded)} in host memory (--cpu-offload-gb)" if offloaded else ""
    if cache <= 0:
        yield problem(
            "model",
            found,
            "the weights alone do not fit",
            f"{smaller_weights(config, facts_of(str(path)))}, --tensor-parallel-size 2, or a larger device",
        )
        return
    yield ok("model", found)
    yield from _contexts(own, limits, cache * ranks)
    if not seen:
        yield from _alternatives(config, path, own.weight_bytes)


def _contexts(own: Footprint, limits: Limits, cache: int) -> Iterator[Finding]:
    """Yields findings about the length and the number of requests."""
    per_token = max(1, own.cache_bytes(1 << 16, limits) >> 16)
    of_one = own.cache_bytes(limits.max_model_len, limits)
    num_tokens = cache // per_token
    lengths = sorted({min(length, limits.max_model_len) for length in (*_LENGTHS, limits.max_model_len)})
    fits = ", ".join(f"{min(limits.max_num_seqs, num_tokens // n)} of {n}" for n in lengths)
    found = f"KV cache of {size(cache)}: {num_tokens:,} tokens of {per_token:,} bytes; requests at once: {fits} tokens"
    if of_one <= cache:
        yield ok("context", found)
        return
    yield problem(
        "context",
        found,
        f"one request of {limits.max_model_len} tokens needs {size(of_one)}: the executor ends at start",
        f"--max-model-len {num_tokens // limits.block_size * limits.block_size}, --kv-cache-dtype fp8, or more "
        "memory for it (--kv-cache-memory-bytes)",
    )


def _alternatives(config: ExecutorConfig, path: Path, weight_bytes: int) -> Iterator[Finding]:
    """Yields the sizes in other precisions that the checkpoint allows."""
    from pagewire.services.executor.loading.footprint import footprint

    texts = []
    for dtype in ("bfloat16", "float32"):
        other = footprint(dataclasses.replace(config, quantization="none", dtype=dtype), path)
        if other is not None and abs(other.weight_bytes - weight_bytes) > weight_bytes // 50:
            texts.append(f"{size(other.weight_bytes)} with --quantization none --dtype {dtype}")
    if texts:
        yield ok("precision", f"{size(weight_bytes)} as configured; {'; '.join(texts)}")
