"""Sums through memory that ranks share, in Triton's interpreter beside ranks that are the reference. Run by
test_values.py as

    TRITON_INTERPRET=1 python -m tests.kernels.triton.collectives

in a process of its own, because Triton reads the variable when a kernel is defined.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from pagewire.kernels import reference
from pagewire.kernels.peer_memory import PART_BYTES, PARTS, PEER_BYTES
from pagewire.kernels.triton import collectives
from tests.kernels.triton.interpreted import run_cases


def summing(size: int, rank: int, dtype: torch.dtype, *counts: int) -> None:
    """Adds tensors of these numbers of elements, one after another, in the same memory; one rank's by the kernel."""
    memories = [torch.zeros(PEER_BYTES, dtype=torch.uint8, device="cpu") for _ in range(size)]
    peers = torch.tensor([memory.data_ptr() for memory in memories], device="cpu")
    given = [[torch.randn(count, device="cpu").to(dtype) for _ in range(size)] for count in counts]

    def add(of: int) -> list[Tensor]:
        function = collectives.peer_all_reduce if of == rank else reference.peer_all_reduce
        epochs = torch.zeros(PARTS, dtype=torch.int32, device="cpu")
        sums = []
        for parts in given:
            x = parts[of].clone()
            function(x, peers, epochs, of)
            sums.append(x)
        return sums

    with ThreadPoolExecutor(size) as ranks:
        others = [ranks.submit(add, of) for of in range(size) if of != rank]
        results = [add(rank), *(other.result() for other in others)]
    for index, parts in enumerate(given):
        expected = torch.zeros(counts[index], device="cpu")
        for part in parts:
            expected += part.float()
        for sums in results:
            assert torch.equal(sums[index], expected.to(dtype)), f"sum {index}"


# Fewer elements than a part, several parts, and the halves of the memory again and again.
CASES: dict[str, Callable[[], None]] = {
    "two ranks": partial(summing, 2, 0, torch.float32, 5, PART_BYTES, 5, 3 * PART_BYTES // 4 + 1, 70),
    "three ranks fp16": partial(summing, 3, 2, torch.float16, PART_BYTES + 3, 8, 8, PART_BYTES),
    "eight ranks": partial(summing, 8, 5, torch.float16, 600, 9000),
}


if __name__ == "__main__":
    sys.exit(run_cases(CASES))
