"""Phi-3 and Phi-4: fused projections, LongRoPE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.services.executor.helpers.paged_batch import PagedBatch
from tests.services.executor.models.tiny import assert_same_logits, load, save_tiny

LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.2, 1.1],
        "long_factor": [1.5, 2.0, 4.0],
        "partial_rotary_factor": 0.75,
    },
    "original_max_position_embeddings": 32,
    "max_position_embeddings": 128,
}


@pytest.mark.architecture("Phi3ForCausalLM")
@pytest.mark.parametrize("overrides", [{}, {"sliding_window": 5, "tie_word_embeddings": True}])
def test_logits(tmp_path: Path, overrides: dict[str, Any]) -> None:
    expected = save_tiny(tmp_path, "Phi3", **overrides)
    assert_same_logits(load(tmp_path, model_impl="pagewire"), expected)


@torch.inference_mode()
@pytest.mark.parametrize(("served", "length"), [(32, 29), (128, 60)])
def test_the_served_length_decides_on_short_or_long_factors(tmp_path: Path, served: int, length: int) -> None:
    """The served length decides, where transformers decides by the length of a sequence: one that is short where long
    ones are served is long."""
    expected = save_tiny(tmp_path, "Phi3", **LONGROPE)
    model = load(tmp_path, max_model_len=served)
    assert model.config.max_supported_len == 128
    ids = torch.randint(67, (length,)).tolist()
    logits = PagedBatch(model, num_requests=1, max_len=length).step({0: ids})[0]
    torch.testing.assert_close(logits, expected(torch.tensor([ids])).logits[0], atol=2e-4, rtol=1e-4)
