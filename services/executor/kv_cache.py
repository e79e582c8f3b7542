"""How much KV cache there is, and its memory."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from pagewire.errors import StartupError
from pagewire.services.executor.layers.kv_spec import KVSpec
from pagewire.services.executor.layers.paged_attention import PagedAttention
from pagewire.services.executor.memory import OutOfMemoryError, mib
from pagewire.services.executor.models.protocol import Model

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}

# On a CPU the cache shares memory with everything else on the machine, so by default it stays modest.
CPU_SHARE_OF_AVAILABLE = 0.25
CPU_MAX_BYTES = 4 * 1024**3


def is_fp8(name: str) -> bool:
    """Of a value of `--kv-cache-dtype`."""
    return name in ("fp8", "fp8_e4m3")


def check_dtype(name: str, model_dtype: torch.dtype) -> None:
    """Raises StartupError for a `--kv-cache-dtype` that the kernels cannot read."""
    if not is_fp8(name) and _DTYPES.get(name, model_dtype) is not model_dtype:
        model_name = str(model_dtype).removeprefix("torch.")
        raise StartupError(
            f"--kv-cache-dtype {name}: keys and values are stored as the model computes ({model_name}) or as fp8; "
            f"use --kv-cache-dtype auto or fp8, or --dtype {name}"
        )


def groups(model: Model) -> dict[KVSpec, list[PagedAttention]]:
    """Layers that keep the same of every token, in layer order."""
    found: dict[KVSpec, list[PagedAttention]] = {}
    for layer in model.attention_layers:
        found.setdefault(layer.kv_spec(), []).append(layer)
    return found


def block_bytes(model: Model, block_size: int) -> int:
    """Bytes of one block over all layers; 0 if no layer keeps anything."""
    return sum(layer.kv_spec().page_bytes(block_size) for layer in model.attention_layers)


def allocate(model: Model, num_blocks: int, block_size: int, device: torch.device) -> list[Tensor]:
    """The cache of each group, [num_blocks, layers of the group, 2, num_kv_heads, block_size, head_dim].

    Binds every layer to its part `cache[:, i]`. What a block holds of all layers of a group is one contiguous piece.

    Zeros, so that a slot that was never written holds no NaN. On the CPU the operating system hands out zero pages when
    they are first touched: an unused cache costs address space only, and no time.
    """
    caches = []
    for spec, layers in groups(model).items():
        shape = (num_blocks, len(layers), *spec.page_shape(block_size))
        cache = _zeros(math.prod(shape) * spec.dtype.itemsize, device).view(spec.dtype).view(shape)
        for index, layer in enumerate(layers):
            layer.kv_cache = cache[:, index]
        caches.append(cache)
    return caches


def _zeros(num_bytes: int, device: torch.device) -> Tensor:
    """uint8 [num_bytes], of which all our dtypes are views: not every torch build can fill fp8."""
    if device.type == "cpu":
        # numpy asks for zero pages where torch.zeros would write them, and for huge ones, without which attention over
        # a group's cache would be up to 9 % slower (benchmarks/results/2026-11-22-kv-cache-groups-cpu.md).
        return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def blocks_within(num_bytes: int, bytes_per_block: int, block_size: int, max_model_len: int, flag: str) -> int:
    """Blocks that num_bytes hold. Raises OutOfMemoryError if one request of max_model_len would not fit.

    flag: what to raise for more.
    """
    num_blocks = max(0, num_bytes) // bytes_per_block
    needed = -(-max_model_len // block_size)
    if num_blocks < needed:
        raise OutOfMemoryError(
            f"the KV cache would be {mib(max(0, num_bytes))}, {num_blocks * block_size} tokens, but one request of "
            f"{max_model_len} tokens needs {mib(needed * bytes_per_block)}: lower --max-model-len to "
            f"{num_blocks * block_size} or less, or raise {flag}"
        )
    return num_blocks


def default_cpu_bytes(available_bytes: int, bytes_per_block: int, block_size: int, max_tokens: int) -> int:
    """A bounded share of the available memory, and no more than max_tokens (all rows at full length) can use."""
    usable = -(-max_tokens // block_size) * bytes_per_block
    return min(int(available_bytes * CPU_SHARE_OF_AVAILABLE), CPU_MAX_BYTES, usable)
