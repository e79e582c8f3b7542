"""SmolLM3: some layers do not rotate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.models.dense.smollm3 import smollm3_config
from tests.services.executor.models.tiny import TINY, assert_same_logits, load, save_tiny


@pytest.mark.architecture("SmolLM3ForCausalLM")
@pytest.mark.parametrize(
    "overrides", [{"no_rope_layer_interval": 2}, {"no_rope_layers": [0, 1, 1], "tie_word_embeddings": False}]
)
def test_logits(tmp_path: Path, overrides: dict[str, Any]) -> None:
    expected = save_tiny(tmp_path, "SmolLM3", **overrides)
    assert_same_logits(load(tmp_path, model_impl="pagewire"), expected)


def test_every_layer_must_be_named(tmp_path: Path) -> None:
    raw = {**TINY, "architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0]}
    with pytest.raises(ModelLoadError, match="config key no_rope_layers: 2 entries, num_hidden_layers is 3"):
        smollm3_config(raw, torch.float32)
