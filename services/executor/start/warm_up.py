"""Steps of dummy requests, run at start so that no real request waits for a compilation."""

from __future__ import annotations

from itertools import count, takewhile

import torch

from pagewire.services.executor.batch.input_batch import BatchShape
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.start.host_memory import reserve
from pagewire.services.executor.start.memory_profile import COSTLY_PROMPT, COSTLY_SAMPLING
from pagewire.services.executor.step.limits import Limits


def warm_up(runner: ModelRunner, device: torch.device) -> None:
    """Compiles kernels and touches memory that the first requests would otherwise wait for, by prefill, mixed and
    decode steps, and an image. Raises InvalidStep if the vision tower and the config differ in an image's size."""
    if 0 < runner.smallest_image < min(runner.limits.max_model_len, runner.limits.max_num_batched_tokens + 1):
        runner.dummy_run(1, runner.smallest_image, with_images=True)
    if device.type == "cpu":
        runner.dummy_run(2, 32)
        runner.dummy_run(2, 2)
        runner.dummy_run(1, 1)  # a lone request finds its steps recorded
        if runner.max_draft_tokens:
            for method in reversed(range(len(runner.proposer.methods))):
                runner.proposer.prefer(method)
                runner.uniform_run(with_drafts(runner))
        return
    reserve(device)
    for num_reqs, num_tokens in warm_up_steps(runner.limits):
        runner.dummy_run(num_reqs, num_tokens)
    if runner.adapters.num_slots:  # their kernels are compiled for the model's layers alone
        runner.dummy_run(2, 32, has_adapters=True)
        runner.dummy_run(1, 1, has_adapters=True)
    # The sampler's first pass has two tile sizes, for few and for many rows.
    for num_reqs in (1, runner.limits.max_num_seqs):
        runner.dummy_run(num_reqs, num_reqs, sampling=COSTLY_SAMPLING)
        if runner.max_draft_tokens:
            drafted = with_drafts(runner, num_reqs)
            runner.uniform_run(drafted)
            runner.uniform_run(drafted, sampling=COSTLY_SAMPLING)
    if runner.pooling.generates:
        _warm_up_prompt_logprobs(runner)


def with_drafts(runner: ModelRunner, num_reqs: int = 1) -> BatchShape:
    """Returns the shape of a step in which each request has the most drafts, or as many as a request has room for."""
    longest = min(runner.limits.max_num_batched_tokens, runner.limits.max_model_len - 1)
    return BatchShape.uniform(num_reqs, min(1 + runner.max_draft_tokens, longest))


def _warm_up_prompt_logprobs(runner: ModelRunner) -> None:
    """Runs the head's products for the largest number of prompt tokens that are scored at once."""
    limits = runner.limits
    for size in _powers_of_two(min(runner.max_prompt_lines, limits.max_num_batched_tokens)):
        num_reqs = min(limits.max_num_seqs, -(-size // max(1, limits.max_model_len - 2)))
        runner.dummy_run(num_reqs, num_reqs + size, sampling=COSTLY_PROMPT)


def warm_up_steps(limits: Limits) -> list[tuple[int, int]]:
    """Returns (requests, tokens) of dummy runs, in which one request is long, that compile every kernel of serving.

    Attention is compiled for numbers of requests in powers of four from 128 on (`request_tiles.requests_padded`), and
    tuned for these and for the longest query (`kernels/tuning`). Products with quantized weights are tuned for powers
    of two of tokens, the head's product for powers of two of requests.
    """
    max_tokens = limits.max_num_batched_tokens
    max_reqs = min(limits.max_num_seqs, max_tokens)
    sizes = takewhile(lambda size: size < max_reqs, (4**power for power in count()))
    lengths = (1, 2, 4, 8, 16, 64, 1024)
    steps = {(size, min(size - 1 + length, max_tokens)) for size in (*sizes, max_reqs) for length in lengths}
    steps |= {(size, size) for size in _powers_of_two(max_reqs)}
    for size in _powers_of_two(max_tokens):  # in as few requests as can have this many tokens
        steps.add((min(max_reqs, -(-size // (limits.max_model_len - 1))), size))
    return sorted(steps)


def _powers_of_two(largest: int) -> list[int]:
    """Returns the powers of two below the largest, and the largest itself."""
    return [*takewhile(lambda size: size < largest, (2**power for power in count())), largest]
