"""Granite: constants that everything is multiplied with."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagewire.services.executor.config.model_config import ModelLoadError
from tests.services.executor.models.tiny import assert_same_logits, load, save_tiny


@pytest.mark.architecture("GraniteForCausalLM")
def test_logits(tmp_path: Path) -> None:
    expected = save_tiny(
        tmp_path,
        "Granite",
        embedding_multiplier=12.0,
        attention_multiplier=0.2,
        residual_multiplier=0.22,
        logits_scaling=3.0,
        rms_norm_eps=0.01,
        tie_word_embeddings=True,
    )
    assert_same_logits(load(tmp_path, model_impl="pagewire"), expected)


def test_constants_must_be_positive(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Granite", residual_multiplier=0.0)
    with pytest.raises(ModelLoadError, match=r"config key residual_multiplier: expected a positive number, found 0\.0"):
        load(tmp_path)
