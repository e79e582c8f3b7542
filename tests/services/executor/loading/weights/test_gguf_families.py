"""GGUF files of further families, with tensors named by the `gguf` package and metadata as llama.cpp's converter writes
it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagewire.services.executor.config.model_config import ModelLoadError
from tests.services.executor.helpers.paged_batch import PagedBatch
from tests.services.executor.loading.weights.converted import write
from tests.services.executor.loading.weights.test_gguf import load, tiny_model
from tests.services.executor.models.tiny import assert_same_logits

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "phi3": ("Phi3", {}, {}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.25,
            "logits_scaling": 3.0,
            "tie_word_embeddings": True,
        },
        {"embedding_scale": 12.0, "attention__scale": 0.2, "residual_scale": 0.25, "logit_scale": 3.0},
    ),
    "mistral3": ("Mistral", {"sliding_window": None}, {}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4}, {}),
    "glm4": ("Glm4", {"head_dim": 16}, {}),
    "olmo2": ("Olmo2", {}, {}),
    "starcoder2": ("Starcoder2", {}, {}),
    "command-r": ("Cohere", {"logit_scale": 0.5}, {"logit_scale": 0.5}),
    "cohere2": (
        "Cohere2",
        {"logit_scale": 0.5, "sliding_window": 5, "num_hidden_layers": 4},
        {"logit_scale": 0.5, "attention__sliding_window": 5},
    ),
    "seed_oss": ("SeedOss", {"head_dim": 16}, {"attention__key_length": 16}),
    "chatglm": ("Glm", {"head_dim": 16}, {}),
    "phi2": ("Phi", {}, {}),
    "mamba2": (
        "Mamba2",
        {"num_heads": 16, "head_dim": 8, "state_size": 16, "n_groups": 2},
        {
            "context_length": 1 << 20,
            "feed_forward_length": 0,
            "attention__head_count": 0,
            "attention__head_count_kv": None,
            "rope__freq_base": None,
            "rope__dimension_count": None,
            "attention__layer_norm_rms_epsilon": 1e-5,
            "attention__layer_norm_epsilon": None,
            "ssm__conv_kernel": 4,
            "ssm__inner_size": 128,
            "ssm__state_size": 16,
            "ssm__time_step_rank": 16,
            "ssm__group_count": 2,
        },
    ),
    "gpt2": ("GPT2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "n_inner": 96}, {}),
    "gptneox": ("GPTNeoX", {}, {"use_parallel_residual": True, "attention__head_count_kv": None}),
    "falcon": (
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 96, "tie_word_embeddings": False},
        {},
    ),
}


@pytest.mark.parametrize("arch", CASES)
def test_round_trip(tmp_path: Path, arch: str) -> None:
    family, overrides, metadata = CASES[arch]
    expected = tiny_model(family, **overrides)
    assert_same_logits(load(write(tmp_path / "tiny.gguf", expected, arch, **metadata)), expected)


FURTHER: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "layers one after the other": (
        "gptneox",
        "GPTNeoX",
        {"use_parallel_residual": False},
        {"use_parallel_residual": False, "attention__head_count_kv": None},
    ),
    "one KV head": ("falcon", "Falcon", {"bias": True}, {"attention__head_count_kv": 1}),
    "one norm": (
        "falcon",
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        {},
    ),
}

WINDOWED = {"sliding_window": 5, "num_hidden_layers": 4}
FULL_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
FURTHER |= {
    "olmo3": (
        "olmo2",
        "Olmo3",
        {**WINDOWED, "layer_types": ["full_attention", "sliding_attention"] * 2},
        {"attention__sliding_window": 5, "attention__sliding_window_pattern": [False, True] * 2},
    ),
    "olmo3 without a pattern, scaled where there is no window": (
        "olmo2",
        "Olmo3",
        {
            **WINDOWED,
            "rope_parameters": {
                "full_attention": FULL_YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        {"attention__sliding_window": 5},
    ),
}


@pytest.mark.parametrize("case", FURTHER)
def test_forms_of_one_architecture(tmp_path: Path, case: str) -> None:
    arch, family, overrides, metadata = FURTHER[case]
    expected = tiny_model(family, **overrides)
    assert_same_logits(load(write(tmp_path / "tiny.gguf", expected, arch, **metadata)), expected)


@pytest.mark.parametrize(("arch", "family"), [("phi2", "Phi"), ("chatglm", "Glm")])
def test_queries_keys_and_values_in_one_tensor(tmp_path: Path, arch: str, family: str) -> None:
    """The converter leaves them in one tensor where the original model has them so."""
    expected = tiny_model(family, head_dim=16)
    state = {name: value.numpy() for name, value in expected.state_dict().items()}
    tensors: dict[str, np.ndarray | None] = {}
    for layer in range(expected.config.num_hidden_layers):
        for end in ("weight", "bias"):
            parts = [state[f"model.layers.{layer}.self_attn.{name}_proj.{end}"] for name in "qkv"]
            tensors |= {f"blk.{layer}.attn_{name}.{end}": None for name in "qkv"}
            tensors[f"blk.{layer}.attn_qkv.{end}"] = np.concatenate(parts)
    assert_same_logits(load(write(tmp_path / "tiny.gguf", expected, arch, tensors)), expected)
    tensors["blk.1.attn_qkv.weight"] = np.zeros((72, 64), dtype=np.float32)
    path = write(tmp_path / "short.gguf", expected, arch, tensors)
    with pytest.raises(
        ModelLoadError, match=r"short\.gguf: tensor blk\.1\.attn_qkv\.weight: expected \d+ rows.* convert"
    ):
        load(path)


@torch.inference_mode()
@pytest.mark.parametrize("served", [32, 64])
def test_long_and_short_factors_of_phi3(tmp_path: Path, served: int) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, "factor": 2.0}
    factors = {"short_factor": [1.0, 1.2, 1.1, 1.3, 1.1, 1.0], "long_factor": [1.5, 2.0, 4.0, 1.0, 3.0, 2.0]}
    rope |= {**factors, "original_max_position_embeddings": 32}
    expected = tiny_model("Phi3", rope_parameters=rope, original_max_position_embeddings=32)
    attention = float(np.sqrt(1 + np.log(2) / np.log(32)))
    metadata: dict[str, Any] = {"rope__scaling__original_context_length": 32, "rope__scaling__attn_factor": attention}
    path = write(tmp_path / "tiny.gguf", expected, "phi3", **metadata)
    ids = torch.randint(67, (served - 3,)).tolist()
    logits = PagedBatch(load(path, max_model_len=served), num_requests=1, max_len=served).step({0: ids})[0]
    torch.testing.assert_close(logits, expected(torch.tensor([ids])).logits[0], atol=2e-4, rtol=1e-4)


def test_a_pattern_of_windows_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    metadata: dict[str, Any] = {"attention__sliding_window": 5, "attention__sliding_window_pattern": [False, True]}
    path = write(tmp_path / "tiny.gguf", tiny_model("Olmo3", **WINDOWED), "olmo2", **metadata)
    with pytest.raises(
        ModelLoadError, match=r"tiny\.gguf: .*sliding_window_pattern: .* each of 4 layers, .*convert it"
    ):
        load(path)


WRONG_STATES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a state that grows": (
        {"blk.1.ssm_a": np.full((16, 1), 0.5, dtype=np.float32)},
        {},
        r"tensor blk\.1\.ssm_a has values that none can have; .* convert it again",
    ),
    "heads that do not fit": (
        {},
        {"ssm__time_step_rank": 12},
        r"ssm\.inner_size \(128\) is not a multiple of .* \(12\)",
    ),
    "no groups": ({}, {"ssm__group_count": None}, r"mamba2\.ssm\.group_count: expected a positive whole number"),
}


@pytest.mark.parametrize("case", WRONG_STATES)
def test_wrong_files_of_state_space_models_are_refused(tmp_path: Path, case: str) -> None:
    tensors, changes, message = WRONG_STATES[case]
    _, overrides, metadata = CASES["mamba2"]
    path = write(tmp_path / "tiny.gguf", tiny_model("Mamba2", **overrides), "mamba2", tensors, **(metadata | changes))
    with pytest.raises(ModelLoadError, match=message):
        load(path)
