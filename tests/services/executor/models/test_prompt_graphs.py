"""Steps with prompts by graphs, of models with layers that differ from Llama's. The stand-in for graphs is that of
`test_cuda_graphs`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagewire.services.executor.start.assembly import assemble
from pagewire.services.executor.start.graph_capture import capture_graphs
from tests.services.executor.graphs.test_cuda_graphs import ReplayedFunction
from tests.services.executor.helpers.stepping import CPU, LIMITS, VOCAB_SIZE, Driver, check_random_steps, graph_steps
from tests.services.executor.models.experts.test_deepseek import LATENT
from tests.services.executor.models.test_mamba2 import SIZES
from tests.services.executor.models.tiny import load, save_tiny

FAMILIES: dict[str, dict[str, Any]] = {
    "DeepseekV2": LATENT | {"q_lora_rank": None},  # latent vectors, experts
    "Gemma2": {"sliding_window": 5, "head_dim": 16},  # two groups of layers, caps
    "Mamba2": SIZES,  # a state
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96},  # no rotation, biases
}


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_change_no_token(tmp_path: Path, family: str) -> None:
    save_tiny(tmp_path, family, vocab_size=VOCAB_SIZE, max_position_embeddings=96, **FAMILIES[family])
    model = load(tmp_path)
    runner = assemble(model, LIMITS, 64, CPU)
    capture_graphs(runner, (1, 8), lambda fraction, text: None, ReplayedFunction, prompts=(16, 24, 40))
    for cache in runner.kv_caches:
        cache.fill_(float("nan"))
    eager, replayed = graph_steps("eager"), graph_steps("replayed")
    check_random_steps(model, Driver(runner, 64), seed=2)
    assert graph_steps("replayed") > replayed + 15
    assert graph_steps("eager") > eager  # those of requests alone, which are compared
