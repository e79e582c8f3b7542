"""Two ways to bring together what the experts of several ranks make of tokens (`layers/whole_experts.py`): ranks add
their sums up, or exchange the rows and gather the sums. Without the experts themselves, which cost the same both ways.

    python -m benchmarks.expert_parallel [--ranks 4]

Both are timed in turns, recorded as steps are, in processes of this machine. What is told is the median of rounds of
the slowest rank's time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from pagewire.kernels import ops
from pagewire.kernels.cpu.recording import Memory, record
from pagewire.services.executor.layers.whole_experts import WholeExperts
from pagewire.services.executor.parallel.shared_memory import Channel, SharedMemory

NUM_EXPERTS, WIDTH, DTYPE = 64, 1024, torch.bfloat16
TOKENS = (1, 8, 32, 64, 128, 512, 2048)
TOP_K = (1, 2, 4, 8)
ROUNDS, SECONDS = 7, 0.02

Ways = dict[str, Callable[[], None]]


def _rank(rank: int, size: int, parent: int, descriptor: int, results: Any) -> None:
    torch.set_num_threads(1)
    memory = SharedMemory([size], os.open(f"/proc/{parent}/fd/{descriptor}", os.O_RDWR))
    ranks = memory.channel(0, rank)
    generator = torch.Generator().manual_seed(0)
    for top_k in TOP_K:
        for num_tokens in TOKENS:
            kept, ways = _ways(num_tokens, top_k, ranks, generator)
            calls = max(3, int(SECONDS / _seconds(ways["sums"], 3, ranks)))
            times: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(ROUNDS):
                for name, way in ways.items():
                    times[name].append(_seconds(way, calls, ranks))
            del kept
            if rank == 0:
                results.put((top_k, num_tokens, {name: statistics.median(found) for name, found in times.items()}))


def _ways(num_tokens: int, top_k: int, ranks: Channel, generator: torch.Generator) -> tuple[object, Ways]:
    """(what has to stay in memory, the ways)"""
    whole = WholeExperts(NUM_EXPERTS, top_k, ranks, torch.device("cpu"))
    choice = torch.rand(num_tokens, NUM_EXPERTS, generator=generator)
    ids, weights = ops.route_experts(choice, None, top_k, "softmax", True, 1.0, 1, 1, 1)
    pairs = torch.zeros(num_tokens * top_k, WIDTH, dtype=DTYPE)

    def sums() -> Tensor:
        return ranks.all_reduce(ops.combine_experts(pairs, whole.own_weights(ids, weights)))

    def exchanges() -> Tensor:
        return whole.exchanged(pairs, ids, weights)

    return (sums, exchanges), {way.__name__: record(way, Memory()).replay for way in (sums, exchanges)}


def _seconds(function: Callable[[], object], calls: int, ranks: Channel) -> float:
    """Of a call, on the slowest rank."""
    function()
    started = time.perf_counter()
    for _ in range(calls):
        function()
    taken = torch.tensor([[(time.perf_counter() - started) / calls]], dtype=torch.float64)
    return float(ranks.all_gather(taken).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    size = parser.parse_args().ranks
    memory, results = SharedMemory([size]), mp.get_context("spawn").SimpleQueue()
    mp.spawn(_rank, (size, os.getpid(), memory.descriptor, results), nprocs=size)
    print(
        f"{size} ranks, rows of {WIDTH} {DTYPE}: microseconds\n{'experts':>8}{'tokens':>8}{'sums':>10}{'exchanges':>12}"
    )
    while not results.empty():
        top_k, num_tokens, medians = results.get()
        sums, exchanges = (1e6 * medians[name] for name in ("sums", "exchanges"))
        print(f"{top_k:>8}{num_tokens:>8}{sums:>10.1f}{exchanges:>12.1f}{sums / exchanges:>8.2f}x")


if __name__ == "__main__":
    main()
