"""The KV cache: its number of blocks, and their memory."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pagewire.services.executor.device.memory import OutOfMemoryError, mib
from pagewire.services.executor.layers.kv_spec import CacheSpec, CachingLayer, StateSpec
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.step.limits import STATE_TOKENS, Limits

# A token reads the state after the token before it, like a window of two tokens.
_STATE_WINDOW = 2

# On a CPU the cache shares memory with everything else on the machine, so it is small by default.
CPU_SHARE_OF_AVAILABLE = 0.25
CPU_MAX_BYTES = 4 * 1024**3


def has_state(model: Model) -> bool:
    return any(isinstance(spec, StateSpec) for spec in groups(model))


def groups(model: Model) -> dict[CacheSpec, list[CachingLayer]]:
    """Groups of layers with equal caches, in layer order; a stage of a pipeline has the groups of the whole model."""
    found: dict[CacheSpec, list[CachingLayer]] = {spec: [] for spec in model.cache_order}
    for layer in model.caching_layers:
        found.setdefault(layer.kv_spec(), []).append(layer)
    return found


@dataclass(frozen=True)
class KVGroup:
    """The cache of one group of layers, as the scheduler sees it."""

    num_blocks: int
    window: int  # tokens that a query sees, itself included; 0 = all
    state_tokens: int = 0  # tokens per block if blocks hold states; 0 = blocks hold an entry per token

    def block_tokens(self, limits: Limits) -> int:
        """Returns the number of tokens per block."""
        return self.state_tokens or limits.block_size


def kv_groups(model: Model, num_blocks: int, limits: Limits) -> tuple[KVGroup, ...]:
    """Returns the groups of the model. num_blocks: blocks of a group that sees all tokens. A group with a window has at
    most the blocks that it can use; a group of states at most the blocks for the same number of tokens."""
    return tuple(_group(spec, num_blocks, limits) for spec in groups(model))


def _group(spec: CacheSpec, num_blocks: int, limits: Limits) -> KVGroup:
    if isinstance(spec, StateSpec):
        most = -(-num_blocks * limits.block_size // limits.state_tokens)
        useful = _useful_blocks(_STATE_WINDOW, _of_states(limits))
        return KVGroup(min(most, useful), 0, limits.state_tokens)
    return KVGroup(min(num_blocks, _useful_blocks(spec.window, limits)) if spec.window else num_blocks, spec.window)


def _of_states(limits: Limits) -> Limits:
    """Returns the limits with the block size of states."""
    return replace(limits, block_size=limits.state_tokens)


def _useful_blocks(window: int, limits: Limits) -> int:
    """Returns the number of blocks that a group with a window can use.

    With R rows and T tokens per step, requests hold at most R * (ceil(window / block_size) + 1) + ceil(T / block_size)
    blocks at once: each its window, which may begin within a block, and all together the tokens of a step. The same
    number again keeps the windows of ended requests for prefix hits.
    """
    held = limits.max_num_seqs * (-(-window // limits.block_size) + 1)
    return 2 * (held + -(-limits.max_num_batched_tokens // limits.block_size))


def _blocks_of_one(window: int, num_tokens: int, limits: Limits) -> int:
    """Returns the most blocks that a request of num_tokens holds: with a window, those of it and of a step's tokens."""
    in_all = -(-num_tokens // limits.block_size)
    if not window:
        return in_all
    return min(in_all, -(-(window + limits.max_num_batched_tokens) // limits.block_size) + 1)


def longest_request(kv_groups: Sequence[KVGroup], limits: Limits) -> int:
    """Returns the tokens of the longest request that the cache can hold, up to max_model_len."""
    short = []
    for group in kv_groups:
        if group.state_tokens:
            needed = _blocks_of_one(_STATE_WINDOW, limits.max_model_len, _of_states(limits))
        else:
            needed = _blocks_of_one(group.window, limits.max_model_len, limits)
        if group.num_blocks < needed:
            short.append(group.num_blocks * group.block_tokens(limits))
    return min(short, default=limits.max_model_len)


def cache_bytes(model: Model, num_blocks: int, limits: Limits) -> int:
    """Returns the bytes of the whole cache; num_blocks as in `kv_groups`."""
    sizes = [group.num_blocks for group in kv_groups(model, num_blocks, limits)]
    return sum(
        size * len(layers) * spec.page_bytes(limits.block_size)
        for size, (spec, layers) in zip(sizes, groups(model).items(), strict=True)
    )


def allocate(
    model: Model,
    num_blocks: Sequence[int],
    block_size: int,
    device: torch.device,
    state_tokens: int = STATE_TOKENS,
) -> list[Tensor]:
    """Allocates the cache of each group, [num_blocks, layers of the group, *page_shape].

    Binds every layer to its part `cache[:, i]`. A block's data of all layers of a group is contiguous.

    num_blocks: blocks of each group. state_tokens: tokens per block of states.

    Zeros, so that a slot that was never written holds no NaN. On the CPU the operating system hands out zero pages when
    they are first touched: an unused cache costs address space only, and no time.
    """
    caches = []
    for group, (spec, layers) in enumerate(groups(model).items()):
        shape = (num_blocks[group], len(layers), *spec.page_shape(block_size))
        if layers:
            cache = zeros(math.prod(shape) * spec.dtype.itemsize, device).view(spec.dtype).view(shape)
        else:
            cache = torch.empty(shape, dtype=spec.dtype, device=device)  # the group's layers are on other stages
        for index, layer in enumerate(layers):
            layer.bind(cache[:, index], group, state_tokens if isinstance(spec, StateSpec) else block_size)
        caches.append(cache)
    return caches


def zeros(num_bytes: int, device: torch.device) -> Tensor:
    """Returns zeros, uint8 [num_bytes], to be viewed as any dtype: not every torch build can fill fp8."""
    if device.type == "cpu":
        # numpy asks for zero pages where torch.zeros would write them, and for huge ones, without which attention over
        # a group's cache would be up to 9 % slower.
        return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def blocks_within(
    num_bytes: int, model: Model, limits: Limits, flag: str, bytes_of: Callable[[int], int] | None = None
) -> int:
    """Returns the num_blocks of `kv_groups` with which the cache takes num_bytes. Raises OutOfMemoryError if one
    request of max_model_len would not fit.

    flag: the flag to raise for more. bytes_of: the size of a number of blocks, if not `cache_bytes`.
    """
    bytes_of = bytes_of or partial(cache_bytes, model, limits=limits)
    num_bytes, block_size, max_model_len = max(0, num_bytes), limits.block_size, limits.max_model_len
    needed = max(_needed_blocks(spec, limits) for spec in groups(model))
    sizes = range(num_bytes + 1)
    num_blocks = bisect.bisect_right(sizes, num_bytes, key=bytes_of) - 1
    if num_blocks < needed:
        fewer = f"lower --max-model-len to {num_blocks * block_size} or less, or " if num_blocks else ""
        raise OutOfMemoryError(
            f"the KV cache would be {mib(num_bytes)}, {num_blocks * block_size} tokens, but one request of "
            f"{max_model_len} tokens needs {mib(bytes_of(needed))}; {fewer}raise {flag}"
        )
    return num_blocks


def _needed_blocks(spec: CacheSpec, limits: Limits) -> int:
    """Returns the num_blocks of `kv_groups` with which a request of max_model_len fits."""
    if isinstance(spec, StateSpec):
        needed = _blocks_of_one(_STATE_WINDOW, limits.max_model_len, _of_states(limits))
        return needed * limits.state_tokens // limits.block_size
    return _blocks_of_one(spec.window, limits.max_model_len, limits)


def default_cpu_bytes(available_bytes: int, usable_bytes: int, cpu_share: float = 1.0) -> int:
    """Returns a bounded share of the available memory, at most what all rows can use at full length. cpu_share: this
    process' share of the machine."""
    return min(int(min(available_bytes * CPU_SHARE_OF_AVAILABLE, CPU_MAX_BYTES) * cpu_share), usable_bytes)
