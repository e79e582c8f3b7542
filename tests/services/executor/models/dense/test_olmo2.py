"""OLMo 2 and 3: norms behind attention and feed-forward, and over all queries and all keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.services.executor.models.tiny import assert_same_logits, load, save_tiny

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo2": ("Olmo2", {}),
    "olmo3": (
        "Olmo3",
        {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "olmo3 with scaled positions": (
        "Olmo3",
        {
            "sliding_window": 5,
            "num_hidden_layers": 4,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 500.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
}


@pytest.mark.architecture("Olmo2ForCausalLM", "Olmo3ForCausalLM")
@pytest.mark.parametrize("case", CASES)
def test_logits(tmp_path: Path, case: str) -> None:
    family, overrides = CASES[case]
    expected = save_tiny(tmp_path, family, **overrides)
    assert_same_logits(load(tmp_path, model_impl="pagewire"), expected)
