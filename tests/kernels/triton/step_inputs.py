"""The step_inputs kernel against its reference, in Triton's interpreter on the CPU. Run by test_values.py as

    TRITON_INTERPRET=1 python -m tests.kernels.triton.step_inputs [--sweep]

in a process of its own, because Triton reads the variable when a kernel is defined. With --sweep, random combinations
instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import torch

from pagewire.kernels import reference
from pagewire.kernels.triton import inputs as step_inputs
from tests.kernels.triton.interpreted import run_cases

# Stands where nothing may write; no token or block id of these tests.
SENTINEL = -77


def step_inputs_case(
    seed: int, num_reqs: int, block_size: int, max_query_len: int, max_model_len: int = 512, groups: int = 1
) -> None:
    """Three steps of a random batch: padding rows, requests that enter with a cached prefix, several new blocks.

    Where nothing may read (unknown tokens, table entries past the blocks) stands a sentinel; the reference's outputs
    hold the same sentinels as the kernel's, so that a stray write shows as a difference.
    """
    random = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=random))

    max_num_seqs, max_blocks = num_reqs + 3, -(-max_model_len // block_size)
    token_ids = torch.randint(0, 50000, (max_num_seqs, max_model_len), generator=random, dtype=torch.int32)
    num_computed_tokens = torch.full((max_num_seqs,), SENTINEL)
    row_block_table = torch.full((groups, max_num_seqs, max_blocks), SENTINEL, dtype=torch.int32)
    num_blocks = [[0] * groups for _ in range(max_num_seqs)]
    next_block = iter(torch.randperm(4 * groups * max_num_seqs * max_blocks, generator=random).tolist())
    for row in range(max_num_seqs):  # a cached prefix of whole blocks: not computed here, its blocks come as new ones
        num_computed_tokens[row] = block_size * draw(0, 3)
    for _ in range(3):
        rows = torch.randperm(max_num_seqs, generator=random)[:num_reqs].tolist()
        rows = [-1 if draw(0, 4) == 0 else row for row in rows]
        query_lens, blocks_before, new_blocks, new_starts = [], [], [], [0]
        for row in rows:
            query_lens.append(draw(1, max_query_len))
            blocks_before.append(list(num_blocks[row]) if row >= 0 else [SENTINEL] * groups)
            for group in range(groups):
                if row >= 0:
                    seq_len = int(num_computed_tokens[row]) + query_lens[-1]
                    spare = draw(0, 1)  # a block that this step does not reach yet
                    wanted = min(max_blocks, -(-seq_len // block_size) + spare)
                    new_blocks += [next(next_block) for _ in range(wanted - num_blocks[row][group])]
                    num_blocks[row][group] = max(wanted, num_blocks[row][group])
                new_starts.append(len(new_blocks))
        query_start_loc = torch.tensor([0, *query_lens]).cumsum(0).int()
        read = (
            torch.tensor(rows, dtype=torch.int32),
            query_start_loc,
            torch.tensor(blocks_before, dtype=torch.int32),
            torch.tensor(new_starts, dtype=torch.int32),
            torch.tensor([*new_blocks, SENTINEL], dtype=torch.int32),
            token_ids,
        )
        num_tokens = int(query_start_loc[-1]) + 2
        changed = (num_computed_tokens, row_block_table)
        written = (
            *(torch.full((num_tokens,), SENTINEL) for _ in range(2)),
            torch.full((groups, num_tokens), SENTINEL),
            torch.full((num_reqs,), SENTINEL, dtype=torch.int32),
            torch.full((groups, num_reqs, max_blocks + 5), SENTINEL, dtype=torch.int32)[:, :, :max_blocks],
        )
        actual = [tensor.clone() for tensor in (*changed, *written)]
        expected = [tensor.clone() for tensor in (*changed, *written)]
        for run, tensors in ((step_inputs.step_inputs, actual), (reference.step_inputs, expected)):
            arguments: list[Any] = [*read, *tensors, block_size]
            run(*arguments)
        for index, (got, want) in enumerate(zip(actual, expected, strict=True)):
            assert torch.equal(got, want), f"argument {len(read) + index}: {got.tolist()} instead of {want.tolist()}"
        num_computed_tokens, row_block_table = expected[:2]


def long_prompt_case() -> None:
    """More tokens and more pages than one loop iteration takes."""
    step_inputs_case(seed=5, num_reqs=2, block_size=1, max_query_len=2500, max_model_len=8192)


CASES: dict[str, Callable[[], None]] = {
    "decode": partial(step_inputs_case, 0, 9, 16, 1),
    "mixed": partial(step_inputs_case, 1, 6, 16, 40),
    "small pages": partial(step_inputs_case, 2, 5, 3, 70),
    "large pages": partial(step_inputs_case, 3, 7, 64, 90),
    "one request": partial(step_inputs_case, 4, 1, 32, 100),
    "two groups": partial(step_inputs_case, 6, 6, 16, 40, groups=2),
    "no group": partial(step_inputs_case, 7, 3, 16, 40, groups=0),
    "long prompts": long_prompt_case,
}


def random_step_case(seed: int) -> None:
    random = Random(seed)
    num_reqs, block_size, max_query_len = (
        random.randint(1, 40),
        random.choice([1, 16, 32, 64]),
        random.choice([1, 17, 130]),
    )
    # Three cached blocks and three steps fit.
    step_inputs_case(seed, num_reqs, block_size, max_query_len, max_model_len=1024, groups=seed % 4)


SWEEP: dict[str, Callable[[], None]] = {f"seed {seed}": partial(random_step_case, seed) for seed in range(100)}


if __name__ == "__main__":
    sys.exit(run_cases(CASES, SWEEP))
