"""Values of config.json that no model of a family has are named, before anything is made of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.models.registry import ARCHITECTURES
from pagewire.services.executor.models.registry.table import example_config

CASES: list[tuple[str, dict[str, Any], str]] = [
    (
        "MistralForCausalLM",
        {"sliding_window": -1},
        "key sliding_window: expected a positive integer up to 268435456, found -1",
    ),
    ("MixtralForCausalLM", {"sliding_window": "all"}, "key sliding_window: .* found 'all'"),
    ("Phi3ForCausalLM", {"sliding_window": -1}, "key sliding_window"),
    ("Starcoder2ForCausalLM", {"sliding_window": 4096.0}, "key sliding_window"),
    ("Gemma3ForCausalLM", {"sliding_window": -4096}, "key sliding_window"),
    ("Qwen3ForCausalLM", {"layer_types": "full_attention"}, "key layer_types: expected a list"),
    ("Qwen3ForCausalLM", {"layer_types": [["full_attention"]]}, "key layer_types"),
    (
        "LlamaForCausalLM",
        {"vocab_size": True},
        "key vocab_size: expected a positive integer up to 268435456, found True",
    ),
    ("CohereForCausalLM", {"hidden_size": 8}, r"hidden_size \(8\) is smaller than num_attention_heads \(16\)"),
    ("DeepseekV3ForCausalLM", {"n_group": 3}, "16 experts cannot be 3 groups"),
    ("DeepseekV3ForCausalLM", {"n_group": 16, "topk_group": 8}, "16 experts cannot be 16 groups .* of 2 at least"),
    ("DeepseekV3ForCausalLM", {"n_group": 4, "topk_group": 5}, "5 of 4 groups"),
]


@pytest.mark.parametrize(("name", "changes", "message"), CASES)
def test_wrong_values_are_named(name: str, changes: dict[str, Any], message: str) -> None:
    architecture = ARCHITECTURES[name]
    with pytest.raises(ModelLoadError, match=message):
        architecture.read_config(example_config(architecture) | changes, torch.float32)


@pytest.mark.parametrize("window", [0, None])
def test_no_window(window: int | None) -> None:
    architecture = ARCHITECTURES["MistralForCausalLM"]
    config = architecture.read_config(example_config(architecture) | {"sliding_window": window}, torch.float32)
    assert not any(config.sliding_windows)
