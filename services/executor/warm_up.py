"""Steps of fake requests, run at start: no request of serving waits for a compilation."""

from __future__ import annotations

from itertools import count, takewhile

import torch

from services.executor.memory_profile import COSTLY_SAMPLING
from services.executor.model_runner import Limits, ModelRunner


def warm_up(runner: ModelRunner, device: torch.device) -> None:
    """Compiles and faults in what the first requests would otherwise wait for: prefill, mixed and decode steps."""
    if device.type == "cpu":
        runner.dummy_run(2, 32)
        runner.dummy_run(2, 2)
        return
    for num_reqs, num_tokens in warm_up_steps(runner.limits):
        runner.dummy_run(num_reqs, num_tokens)
    # The sampler's first pass has two tile sizes, for few and for many rows.
    for num_reqs in (1, runner.limits.max_num_seqs):
        runner.dummy_run(num_reqs, num_reqs, sampling=COSTLY_SAMPLING)


def warm_up_steps(limits: Limits) -> list[tuple[int, int]]:
    """(requests, tokens) of dummy runs, in which one request is long, that compile every attention kernel of serving.

    It is compiled by how many requests a step has, in powers of four from 128 on (`attention_tile.requests_padded`),
    and tuned for that and for the longest query (`kernels/tuning`).
    """
    max_tokens = limits.max_num_batched_tokens
    max_reqs = min(limits.max_num_seqs, max_tokens)
    sizes = takewhile(lambda size: size < max_reqs, (4**power for power in count()))
    lengths = (1, 2, 4, 8, 16, 64, 1024)
    steps = {(size, min(size - 1 + length, max_tokens)) for size in (*sizes, max_reqs) for length in lengths}
    return sorted(steps)
