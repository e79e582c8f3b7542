"""A model with a state in its layers, under the whole executor. See `tokens.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from pagewire.services.executor.models.mamba2 import Mamba2Model
from pagewire.services.executor.start.assembly import assemble
from pagewire.services.executor.start.graph_capture import capture_graphs
from tests.kernels.triton.interpreted import nothing_computed
from tests.services.executor.graphs.test_cuda_graphs import ReplayedFunction
from tests.services.executor.helpers.stepping import BLOCK_SIZE, CPU, LIMITS, VOCAB_SIZE, Driver, prompt
from tests.services.executor.models.tiny import load

_CONFIG: dict[str, Any] = {
    "architectures": ["Mamba2ForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 8,
    "state_size": 16,
    "n_groups": 2,
    "max_position_embeddings": 96,
}


def generate(directory: Path) -> dict[int, list[int]]:
    """request id -> tokens"""
    (directory / "config.json").write_text(json.dumps(_CONFIG))
    model = load(directory, load_format="dummy")
    assert isinstance(model, Mamba2Model)
    generator = torch.Generator().manual_seed(1)
    for name, target in model.load_targets().items():
        if not name.endswith(("norm.weight", "A_log")):
            target.normal_(0.0, 0.5, generator=generator)
    runner = assemble(model, LIMITS, 32, CPU)
    with nothing_computed():
        capture_graphs(runner, (2,), lambda fraction, text: None, ReplayedFunction)
    driver = Driver(runner, 32)
    driver.add(0, prompt(11))
    driver.step({0: 7})
    driver.add(1, prompt(3, seed=1))
    driver.step({0: 4, 1: 3})  # a chunk that goes over the end of a block, and a prompt
    driver.step({1: 1, 0: 1})
    driver.step({0: 1})  # padded
    driver.add(2, prompt(11), shared_blocks=driver.blocks(0)[: 8 // BLOCK_SIZE])
    driver.add(3, prompt(20, seed=2))
    driver.step({0: 1, 2: 3, 3: 20, 1: 1})
    for _ in range(4):
        driver.step({2: 1, 0: 1, 3: 1})
    return driver.tokens
