"""What a KV cache shared by a group of layers costs attention on the CPU: `python -m benchmarks.attention_layout`.

Decode attention of every layer of SmolLM2-135M in turn, in bfloat16 and fp8: over a cache of each layer's own
[num_blocks, 2, num_kv_heads, block_size, head_dim], and over the views `[:, layer]` of one cache
[num_blocks, layers, 2, num_kv_heads, block_size, head_dim]. Blocks of a request are in random order. The contenders
take turns; each number is the best of the rounds, and with one thread (the default) it is CPU time, which other work
on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pagewire.kernels import ops

LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 30, 9, 3, 64, 16
PAGE = (2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """In memory as the executor's KV cache has it: numpy asks for huge pages, torch does not."""
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


def decode_of_all_layers(caches: list[Tensor], num_reqs: int, context: int) -> Callable[[], None]:
    """A step's attention; caches[layer] is [num_blocks, 2, num_kv_heads, block_size, head_dim]."""
    query = torch.randn(num_reqs, NUM_HEADS, HEAD_DIM).bfloat16()
    table = torch.randperm(caches[0].shape[0]).int().view(num_reqs, -1)
    starts, seq_lens = torch.arange(num_reqs + 1).int(), torch.full((num_reqs,), context).int()
    scales = torch.ones(2, NUM_KV_HEADS) if caches[0].dtype is torch.float8_e4m3fn else None

    def run() -> None:
        for cache in caches:
            ops.paged_attention(
                query, cache, table, starts, seq_lens, 1, 1, HEAD_DIM**-0.5, 0, 0.0, scales, None, 0, None
            )

    return run


def best_times(contenders: list[Callable[[], None]], rounds: int) -> list[float]:
    """Seconds of a call of each."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = [float("inf")] * len(contenders)
    for _ in range(rounds):
        for index, run in enumerate(contenders):
            started = clock()
            run()
            best[index] = min(best[index], clock() - started)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print("| KV cache | requests | context | a cache per layer, ms | one for the group, ms | ratio |")
    print("|---|---|---|---|---|---|")
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        for num_reqs in (1, 8, 32):
            for context in (256, 2048):
                num_blocks = num_reqs * context // BLOCK_SIZE
                views = list(zeros((num_blocks, LAYERS, *PAGE), dtype).unbind(1))
                own = [zeros((num_blocks, *PAGE), dtype) for _ in views]
                for view, cache in zip(views, own, strict=True):
                    cache.copy_(torch.randn(cache.shape))
                    view.copy_(cache)
                runs = [decode_of_all_layers(caches, num_reqs, context) for caches in (own, views)]
                apart, together = best_times(runs, max(5, arguments.rounds // num_reqs))
                print(
                    f"| {str(dtype).removeprefix('torch.')} | {num_reqs} | {context} | {1e3 * apart:.3g} "
                    f"| {1e3 * together:.3g} | {together / apart:.3f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
