"""GLM-4: neighbours are rotated, in half of each head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.services.executor.models.tiny import assert_same_logits, load, save_tiny


@pytest.mark.architecture("GlmForCausalLM", "Glm4ForCausalLM")
@pytest.mark.parametrize("family", ["Glm", "Glm4"])
@pytest.mark.parametrize("overrides", [{"head_dim": 8}, {"head_dim": 16, "attention_bias": False}])
def test_logits(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    expected = save_tiny(tmp_path, family, **overrides)
    assert_same_logits(load(tmp_path, model_impl="pagewire"), expected)
