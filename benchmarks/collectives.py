"""All-reduce between processes of this machine: through shared memory, compared with gloo.

    python -m benchmarks.collectives [--ranks 2] [--json-out FILE]

Both are timed in turns, in the same processes, on tensors of a decode step's size. What is told is the median of
rounds of the slowest rank's time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from pagewire.services.executor.parallel.communicator import Communicator
from pagewire.services.executor.parallel.shared_memory import SharedMemory
from pagewire.services.executor.parallel.torch_distributed import TorchCommunicator

WIDTH = 576
TOKENS = (1, 8, 32, 128, 256)
ROUNDS, CALLS = 9, 100


def _rank(rank: int, size: int, port: int, parent: int, descriptor: int, results: Any) -> None:
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    assert dist.group.WORLD is not None
    shared = os.open(f"/proc/{parent}/fd/{descriptor}", os.O_RDWR)
    contestants: dict[str, Communicator] = {
        "shared memory": SharedMemory([size], shared).channel(0, rank),
        "gloo": TorchCommunicator(dist.group.WORLD),
    }
    for dtype in (torch.float32, torch.bfloat16):
        for num_tokens in TOKENS:
            x = torch.zeros(num_tokens, WIDTH, dtype=dtype)
            times: dict[str, list[float]] = {name: [] for name in contestants}
            for _ in range(ROUNDS):
                for name, communicator in contestants.items():
                    times[name].append(_seconds(communicator.all_reduce, x, slowest=contestants["gloo"]))
            if rank == 0:
                medians = {name: statistics.median(values) for name, values in times.items()}
                results.put((str(dtype).removeprefix("torch."), num_tokens, medians))
    dist.destroy_process_group()


def _seconds(all_reduce: Callable[[Tensor], Tensor], x: Tensor, slowest: Communicator) -> float:
    """Of a call, on the slowest rank."""
    for _ in range(5):
        all_reduce(x)
    dist.barrier()
    started = time.perf_counter()
    for _ in range(CALLS):
        all_reduce(x)
    taken = torch.tensor([[(time.perf_counter() - started) / CALLS]], dtype=torch.float64)
    return float(slowest.all_gather(taken).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json-out")
    arguments = parser.parse_args()
    memory = SharedMemory([arguments.ranks])
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    free = dist.TCPStore("127.0.0.1", 0, 1, True)
    port = free.port
    del free
    mp.spawn(
        _rank,
        (arguments.ranks, port, os.getpid(), memory.descriptor, results),
        nprocs=arguments.ranks,
    )
    rows = []
    print(f"{'all-reduce':<22}{'shared memory':>16}{'gloo':>12}{'ratio':>8}")
    while not results.empty():
        dtype, num_tokens, medians = results.get()
        ours, theirs = (1e6 * medians[name] for name in ("shared memory", "gloo"))
        print(f"{num_tokens:>4} x {WIDTH} {dtype:<10}{ours:>13.1f} µs{theirs:>9.1f} µs{theirs / ours:>7.1f}x")
        rows.append({"tokens": num_tokens, "dtype": dtype, "shared_memory_us": ours, "gloo_us": theirs})
    if arguments.json_out:
        Path(arguments.json_out).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
