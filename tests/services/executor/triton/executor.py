"""Tiny models (fp32) under the whole executor, which generate for a few requests: prefilled in chunks, batched, decoded
through recorded graphs and eagerly, greedy and sampled, with drafts and without. See `tokens.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pagewire.services.executor.start.assembly import assemble
from pagewire.services.executor.start.graph_capture import capture_graphs
from tests.kernels.triton.interpreted import nothing_computed
from tests.services.executor.graphs.test_cuda_graphs import ReplayedFunction
from tests.services.executor.helpers.drafting import KnownTexts
from tests.services.executor.helpers.stepping import (
    CPU,
    LIMITS,
    MIXTRAL,
    MIXTRAL_4_BITS,
    Driver,
    prompt,
    sampling_params,
    tiny_llama,
)

# name -> what differs from the tiny Llama's config
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixtral": MIXTRAL,
    "mixtral in 4 bits": MIXTRAL_4_BITS | {"num_hidden_layers": 1},
}


def generate(directory: Path, model: str) -> dict[int, list[int]]:
    """request id -> tokens; model: a key of MODELS"""
    # Most drafts are wrong on any backend.
    proposer = KnownTexts([], 0.0, max_draft_tokens=1)
    runner = assemble(tiny_llama(directory, **MODELS[model]), LIMITS, 32, CPU, proposer=proposer)
    with nothing_computed():
        capture_graphs(runner, (2,), lambda fraction, text: None, ReplayedFunction, prompts=(24,))
    driver = Driver(runner, 32)
    driver.add(0, prompt(11))
    driver.step({0: 7})
    driver.add(1, prompt(3, seed=1), sampling_params(seed=5, top_p=0.8, top_k=50))
    driver.step({0: 4, 1: 3})  # a chunk and a prompt
    driver.step({1: 1, 0: 1})
    driver.step({0: 1})  # padded
    driver.add(2, prompt(20, seed=2), sampling_params(seed=6, repetition_penalty=1.2, logprobs=2))
    driver.step({0: 1, 2: 20, 1: 1})  # padded; decodes beside a prompt that is long enough for the prefill kernel
    driver.step({2: 1, 0: 1, 1: 1})
    driver.step({2: 2, 0: 1, 1: 2}, {2: 1, 1: 1})
    driver.finish(0)
    driver.step({1: 1, 2: 1})
    driver.step({1: 2}, {1: 1})  # padded
    return driver.tokens
