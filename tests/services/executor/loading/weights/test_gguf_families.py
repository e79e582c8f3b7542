"""GGUF files of further families, with tensors named by the `gguf` package and metadata as llama.cpp's converter writes
it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from pagewire.services.executor.model_config import ModelLoadError
from tests.services.executor.loading.weights.test_gguf import interleave, load, tiny_model
from tests.services.executor.models.tiny import assert_same_logits
from tests.services.executor.paged_batch import PagedBatch

LLAMA_ROTARY = ("granite", "smollm3")  # whose converter is that of Llama


def write(path: Path, model: PreTrainedModel, arch: str, **metadata: float) -> Path:
    """metadata: by key without the architecture's name, with __ for a dot."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    rope = getattr(config, "rope_parameters", None) or {}
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    head_dim = config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(getattr(config, "layer_norm_eps", None) or config.norm_epsilon)
    for key, value in metadata.items():
        name = f"{arch}.{key.replace('__', '.')}"
        if isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_float32(name, value)
    for name in ("long", "short"):
        if factors := rope.get(f"{name}_factor"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(factors, dtype=np.float32))
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = value.numpy()
        if arch in LLAMA_ROTARY and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            array = interleave(array, heads)
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        writer.add_tensor(stored, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


CASES: dict[str, tuple[str, dict[str, Any], dict[str, float]]] = {
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
}


@pytest.mark.parametrize("arch", CASES)
def test_round_trip(tmp_path: Path, arch: str) -> None:
    family, overrides, metadata = CASES[arch]
    expected = tiny_model(family, **overrides)
    assert_same_logits(load(write(tmp_path / "tiny.gguf", expected, arch, **metadata)), expected)


@torch.inference_mode()
@pytest.mark.parametrize("served", [32, 64])
def test_long_and_short_factors_of_phi3(tmp_path: Path, served: int) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, "factor": 2.0}
    factors = {"short_factor": [1.0, 1.2, 1.1, 1.3, 1.1, 1.0], "long_factor": [1.5, 2.0, 4.0, 1.0, 3.0, 2.0]}
    rope |= {**factors, "original_max_position_embeddings": 32}
    expected = tiny_model("Phi3", rope_parameters=rope, original_max_position_embeddings=32)
    attention = float(np.sqrt(1 + np.log(2) / np.log(32)))
    metadata = {"rope__scaling__original_context_length": 32, "rope__scaling__attn_factor": attention}
    path = write(tmp_path / "tiny.gguf", expected, "phi3", **metadata)
    ids = torch.randint(67, (served - 3,)).tolist()
    logits = PagedBatch(load(path, max_model_len=served), num_requests=1, max_len=served).step({0: ids})[0]
    torch.testing.assert_close(logits, expected(torch.tensor([ids])).logits[0], atol=2e-4, rtol=1e-4)


def test_olmo3_under_the_name_of_olmo2_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", tiny_model("Olmo2"), "olmo2", attention__sliding_window=16)
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf: config key sliding_window: .* safetensors"):
        load(path)
