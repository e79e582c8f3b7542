"""How much KV cache there is, and its memory."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from services.executor.loader import Model
from services.executor.memory import OutOfMemoryError, mib

# On a CPU the cache shares memory with everything else on the machine, so by default it stays modest.
CPU_SHARE_OF_AVAILABLE = 0.25
CPU_MAX_BYTES = 4 * 1024**3


def block_bytes(model: Model, block_size: int) -> int:
    """Bytes of one block over all layers."""
    config = model.config
    per_token = 2 * config.num_kv_heads * config.head_dim * config.dtype.itemsize
    return model.num_attention_layers * block_size * per_token


def allocate(model: Model, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """One [num_blocks, 2, num_kv_heads, block_size, head_dim] per attention layer.

    Zeros, so that a slot that was never written holds no NaN. On the CPU the operating system hands out zero pages when
    they are first touched: an unused cache costs address space only, and no time.
    """
    config = model.config
    shape = (num_blocks, 2, config.num_kv_heads, block_size, config.head_dim)
    if device.type != "cpu":
        return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(model.num_attention_layers)]
    # numpy asks for zero pages where torch.zeros would write them.
    num_bytes = math.prod(shape) * dtype.itemsize
    return [
        torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
        for _ in range(model.num_attention_layers)
    ]


def blocks_within(num_bytes: int, bytes_per_block: int, block_size: int, max_model_len: int) -> int:
    """Blocks that num_bytes hold. Raises OutOfMemoryError if one request of max_model_len would not fit."""
    num_blocks = max(0, num_bytes) // bytes_per_block
    needed = -(-max_model_len // block_size)
    if num_blocks < needed:
        raise OutOfMemoryError(
            f"the KV cache would be {mib(max(0, num_bytes))}, {num_blocks * block_size} tokens, but one request of "
            f"{max_model_len} tokens needs {mib(needed * bytes_per_block)}: lower --max-model-len to "
            f"{num_blocks * block_size} or less, or raise --kv-cache-memory-bytes"
        )
    return num_blocks


def default_cpu_bytes(available_bytes: int, bytes_per_block: int, block_size: int, max_tokens: int) -> int:
    """A bounded share of the available memory, and no more than max_tokens (all rows at full length) can use."""
    usable = -(-max_tokens // block_size) * bytes_per_block
    return min(int(available_bytes * CPU_SHARE_OF_AVAILABLE), CPU_MAX_BYTES, usable)


def available_cuda_bytes(device: torch.device, utilization: float, peak_bytes: int) -> int:
    """What is left for the cache up to `utilization` of the device.

    peak_bytes: what torch had allocated at the peak of a maximal step, weights included. Memory outside of torch
    (context, other processes) is measured now.
    """
    free, total = torch.cuda.mem_get_info(device)
    outside_torch = total - free - torch.cuda.memory_reserved(device)
    return int(total * utilization) - outside_torch - peak_bytes
