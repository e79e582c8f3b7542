"""How much KV cache there is, and its memory."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from pagewire.errors import StartupError
from pagewire.services.executor.loading.loader import Model
from pagewire.services.executor.memory import OutOfMemoryError, mib

FP8 = torch.float8_e4m3fn
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "fp8": FP8, "fp8_e4m3": FP8}

# On a CPU the cache shares memory with everything else on the machine, so by default it stays modest.
CPU_SHARE_OF_AVAILABLE = 0.25
CPU_MAX_BYTES = 4 * 1024**3


def resolve_dtype(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """What `--kv-cache-dtype` means for a model. Raises StartupError for what the kernels cannot read."""
    dtype = _DTYPES.get(name, model_dtype)
    if dtype not in (FP8, model_dtype):
        model_name = str(model_dtype).removeprefix("torch.")
        raise StartupError(
            f"--kv-cache-dtype {name}: keys and values are stored as the model computes ({model_name}) or as fp8; "
            f"use --kv-cache-dtype auto or fp8, or --dtype {name}"
        )
    return dtype


def block_bytes(model: Model, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    config = model.config
    return len(model.attention_layers) * block_size * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize


def allocate(model: Model, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """One [num_blocks, 2, num_kv_heads, block_size, head_dim] per attention layer.

    Zeros, so that a slot that was never written holds no NaN. On the CPU the operating system hands out zero pages when
    they are first touched: an unused cache costs address space only, and no time.
    """
    config = model.config
    shape = (num_blocks, 2, config.num_kv_heads, block_size, config.head_dim)
    num_bytes = math.prod(shape) * dtype.itemsize
    return [_zeros(num_bytes, device).view(dtype).view(shape) for _ in model.attention_layers]


def _zeros(num_bytes: int, device: torch.device) -> Tensor:
    """uint8 [num_bytes], of which all our dtypes are views: not every torch build can fill fp8."""
    if device.type == "cpu":
        # numpy asks for zero pages where torch.zeros would write them.
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
