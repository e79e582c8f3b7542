"""Gemma 2 and 3 against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pagewire.services.executor.config.model_config import ModelLoadError
from tests.services.executor.models.tiny import TINY, assert_same_logits, load, save_tiny

CAPPED = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 10.0}
GEMMA2: dict[str, dict[str, Any]] = {
    "capped": {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 20, **CAPPED},
    "heads of 256, biased": {
        "head_dim": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "attention_bias": True,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "sliding_window": 3,
    },
    "not tied": {"head_dim": 8, "tie_word_embeddings": False},
}


@pytest.mark.architecture("Gemma2ForCausalLM")
@pytest.mark.parametrize("case", GEMMA2)
def test_gemma2(tmp_path: Path, case: str) -> None:
    expected = save_tiny(tmp_path, "Gemma2", **GEMMA2[case])
    model = load(tmp_path, model_impl="pagewire")
    assert_same_logits(model, expected)
    sliding = [layer == "sliding_attention" for layer in expected.config.layer_types]
    window = expected.config.sliding_window
    assert [layer.kv_spec().window for layer in model.attention_layers] == [
        window * is_sliding for is_sliding in sliding
    ]


# Rotary bases so small that the angles of local and global layers differ within a few tokens.
ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
}
GEMMA3: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": 5,
    "query_pre_attn_scalar": 20,
    "num_hidden_layers": 4,
    "sliding_window_pattern": 2,
    "rope_parameters": ROPES,
}


@pytest.mark.architecture("Gemma3ForCausalLM")
def test_gemma3(tmp_path: Path) -> None:
    expected = save_tiny(tmp_path, "Gemma3Text", **GEMMA3)
    model = load(tmp_path, model_impl="pagewire")
    assert_same_logits(model, expected)
    assert [layer.kv_spec().window for layer in model.attention_layers] == [5, 0, 5, 0]


def test_gemma3_with_the_keys_of_earlier_files(tmp_path: Path) -> None:
    """The keys of published files: no layer_types, two bases side by side, and scaling for the global one."""
    expected = save_tiny(tmp_path, "Gemma3Text", **GEMMA3)
    raw = json.loads((tmp_path / "config.json").read_text())
    for key in ("layer_types", "rope_parameters"):
        del raw[key]
    raw |= {
        "rope_theta": 100.0,
        "rope_local_base_freq": 10.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "sliding_window_pattern": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert_same_logits(load(tmp_path), expected)


@pytest.mark.architecture("Gemma3ForConditionalGeneration")
def test_the_language_model_of_a_gemma3_that_sees(tmp_path: Path) -> None:
    torch.manual_seed(0)
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 28,
        "patch_size": 14,
    }
    text = {**TINY, **GEMMA3, "pad_token_id": 0}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=60
    )
    both = transformers.Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    both.save_pretrained(tmp_path)
    expected = transformers.Gemma3ForCausalLM._from_config(config.text_config, attn_implementation="eager").eval()
    expected.model.load_state_dict(both.model.language_model.state_dict())
    assert_same_logits(load(tmp_path, model_impl="pagewire"), expected)


def test_bidirectional_attention_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Gemma3Text", **GEMMA3, use_bidirectional_attention=True)
    with pytest.raises(ModelLoadError, match="use_bidirectional_attention: only causal"):
        load(tmp_path)
