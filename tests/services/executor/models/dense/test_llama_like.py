"""Models that are Llama's but for their config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.services.executor.models.tiny import assert_same_logits, load, save_tiny

KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ministral": ("Ministral", {"head_dim": 8, "sliding_window": 5, "layer_types": KINDS}),
    "ministral, one window": ("Ministral", {"head_dim": 8, "sliding_window": 5}),
    "seed_oss": ("SeedOss", {"head_dim": 16}),
    "seed_oss biased": ("SeedOss", {"head_dim": 8, "attention_out_bias": True, "mlp_bias": True}),
}


@pytest.mark.architecture("MinistralForCausalLM", "SeedOssForCausalLM")
@pytest.mark.parametrize("case", CASES)
def test_logits(tmp_path: Path, case: str) -> None:
    family, overrides = CASES[case]
    expected = save_tiny(tmp_path, family, **overrides)
    assert_same_logits(load(tmp_path, model_impl="pagewire"), expected)
