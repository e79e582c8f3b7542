"""Command R: parallel halves, neighbours rotated; in Cohere 2 only in layers with a window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.models.dense.cohere import cohere_config
from tests.services.executor.models.tiny import TINY, assert_same_logits, load, save_tiny

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere": ("Cohere", {"logit_scale": 0.5}),
    "cohere2": (
        "Cohere2",
        {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "cohere2 biased": ("Cohere2", {"sliding_window": 5, "attention_bias": True, "num_hidden_layers": 4}),
}


@pytest.mark.architecture("CohereForCausalLM", "Cohere2ForCausalLM")
@pytest.mark.parametrize("case", CASES)
def test_logits(tmp_path: Path, case: str) -> None:
    family, overrides = CASES[case]
    expected = save_tiny(tmp_path, family, **overrides)
    assert_same_logits(load(tmp_path, model_impl="pagewire"), expected)


def test_norms_of_queries_and_keys_are_refused() -> None:
    raw = {**TINY, "architectures": ["CohereForCausalLM"], "use_qk_norm": True}
    with pytest.raises(ModelLoadError, match=r"use_qk_norm.*--model-impl transformers"):
        cohere_config(raw, torch.float32)
