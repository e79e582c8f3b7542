"""GGUF files of GPT-OSS and DeepSeek: what llama.cpp's converter does to experts, sinks and latent attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from pagewire.kernels.quantized import PackedGrouped
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.models.experts.gpt_oss import GptOssModel
from tests.services.executor.loading.weights.converted import write
from tests.services.executor.loading.weights.test_gguf import load, tiny_model
from tests.services.executor.models.tiny import assert_same_logits

GPT_OSS: dict[str, Any] = {
    "intermediate_size": 32,
    "head_dim": 16,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "sliding_window": 5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
}
GPT_OSS_KEYS: dict[str, Any] = {
    "attention__key_length": 16,
    "attention__sliding_window": 5,
    "expert_count": 5,
    "expert_used_count": 3,
    "expert_feed_forward_length": 32,
}


def test_gpt_oss(tmp_path: Path) -> None:
    expected = tiny_model("GptOss", **GPT_OSS)
    assert_same_logits(load(write(tmp_path / "tiny.gguf", expected, "gpt-oss", **GPT_OSS_KEYS)), expected)


def test_gpt_oss_with_experts_in_mxfp4(tmp_path: Path) -> None:
    expected = tiny_model("GptOss", **GPT_OSS)
    types, mxfp4 = {}, gguf.GGMLQuantizationType.MXFP4
    tensors: dict[str, np.ndarray | None] = {}
    for layer, block in enumerate(expected.model.layers):
        experts = block.mlp.experts
        gate_up, down = (torch.empty_like(w.data.transpose(1, 2)) for w in (experts.gate_up_proj, experts.down_proj))
        stored = {"gate": gate_up[:, ::2], "up": gate_up[:, 1::2], "down": down}
        dense = {
            "gate": experts.gate_up_proj[..., ::2],
            "up": experts.gate_up_proj[..., 1::2],
            "down": experts.down_proj,
        }
        for name, values in stored.items():
            blocks = gguf.quantize(dense[name].detach().transpose(1, 2).contiguous().numpy(), mxfp4)
            tensors[f"blk.{layer}.ffn_{name}_exps.weight"] = blocks
            types[f"blk.{layer}.ffn_{name}_exps.weight"] = mxfp4
            values.copy_(torch.from_numpy(gguf.dequantize(blocks, mxfp4)))
        experts.gate_up_proj.data.copy_(gate_up.transpose(1, 2))
        experts.down_proj.data.copy_(down.transpose(1, 2))
    path = write(tmp_path / "tiny.gguf", expected, "gpt-oss", tensors, types, **GPT_OSS_KEYS)
    model = load(path)
    assert isinstance(model, GptOssModel)
    assert sum(isinstance(part, PackedGrouped) for module in model.modules() for part in module.parts) == 6
    assert_same_logits(model, expected)
    assert_same_logits(load(path, quantization="none"), expected)


@pytest.mark.parametrize(
    ("tensors", "keys", "message"),
    [
        ({}, {"expert_used_count": None}, r"metadata key gpt-oss\.expert_used_count: .* convert it again"),
        ({"blk.1.attn_sinks.weight": None}, {}, r"missing: model\.layers\.1\.self_attn\.sinks; download it again"),
        (
            {"blk.0.ffn_gate_exps.bias": np.zeros((5, 32, 1), np.float32)},
            {},
            r"ffn_gate_exps\.bias: expected 2 dimensions, found \[5, 32, 1\]; .* convert it again",
        ),
    ],
)
def test_gpt_oss_files_that_lack_something(
    tmp_path: Path, tensors: dict[str, np.ndarray | None], keys: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / "tiny.gguf", tiny_model("GptOss", **GPT_OSS), "gpt-oss", tensors, **(GPT_OSS_KEYS | keys))
    with pytest.raises(ModelLoadError, match=rf"tiny\.gguf: .*{message}"):
        load(path)


LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
LATENT_KEYS: dict[str, Any] = {
    "attention__head_count_kv": 1,
    "attention__q_lora_rank": 20,
    "attention__kv_lora_rank": 24,
    "attention__key_length": 32,
    "attention__value_length": 24,
    "attention__key_length_mla": 40,
    "attention__value_length_mla": 16,
    "rope__dimension_count": 8,
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_feed_forward_length": 32,
    "expert_shared_count": 1,
    "leading_dense_block_count": 1,
}
V3 = {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
V3_KEYS: dict[str, Any] = {
    "expert_gating_func": 2,
    "expert_weights_norm": True,
    "expert_weights_scale": 2.5,
    "expert_group_count": 4,
    "expert_group_used_count": 2,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}
DEEPSEEK: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "V2-Lite": ("DeepseekV2", {"q_lora_rank": None}, {"attention__q_lora_rank": None}),
    "V2": (
        "DeepseekV2",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 3.0},
        {"expert_group_count": 4, "expert_group_used_count": 2, "expert_weights_scale": 3.0, "expert_gating_func": 1},
    ),
    "V2 with scaled positions": (
        "DeepseekV2",
        {"rope_parameters": YARN, "first_k_dense_replace": 0},
        {
            "rope__scaling__yarn_log_multiplier": 0.07,
            "leading_dense_block_count": 0,
        },
    ),
    "V3": ("DeepseekV3", V3, V3_KEYS),
    "V3 without groups or norm": (
        "DeepseekV3",
        {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
        {"expert_gating_func": 2},
    ),
}


def deepseek(family: str, overrides: dict[str, Any]) -> PreTrainedModel:
    model = tiny_model(family, **(LATENT | overrides))
    generator = torch.Generator().manual_seed(5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.3, generator=generator)
    return model


def whole_projections(model: PreTrainedModel) -> dict[str, np.ndarray | None]:
    """Keys' and values' parts of `kv_b_proj` in one tensor, as files had it before May 2025."""
    tensors: dict[str, np.ndarray | None] = {}
    for layer, block in enumerate(model.model.layers):
        tensors |= {f"blk.{layer}.attn_k_b.weight": None, f"blk.{layer}.attn_v_b.weight": None}
        tensors[f"blk.{layer}.attn_kv_b.weight"] = block.self_attn.kv_b_proj.weight.detach().numpy()
    return tensors


@pytest.mark.parametrize("case", DEEPSEEK)
def test_deepseek(tmp_path: Path, case: str) -> None:
    family, overrides, keys = DEEPSEEK[case]
    expected = deepseek(family, overrides)
    model = load(write(tmp_path / "tiny.gguf", expected, "deepseek2", **(LATENT_KEYS | keys)))
    assert model.config.architecture == f"{family}ForCausalLM"
    assert_same_logits(model, expected)


def test_deepseek_before_projections_were_split(tmp_path: Path) -> None:
    expected = deepseek("DeepseekV3", V3)
    old = {
        "attention__head_count_kv": 4,
        "attention__key_length": 40,
        "attention__value_length": 16,
        "attention__key_length_mla": None,
        "attention__value_length_mla": None,
    }
    path = write(
        tmp_path / "tiny.gguf", expected, "deepseek2", whole_projections(expected), **(LATENT_KEYS | V3_KEYS | old)
    )
    assert_same_logits(load(path), expected)


def test_split_projections_in_blocks(tmp_path: Path) -> None:
    """Split projections are dequantized, through the cache of packed weights as well, and change their type alone."""
    expected = deepseek("DeepseekV3", V3 | {"kv_lora_rank": 32})
    keys = LATENT_KEYS | V3_KEYS | {"attention__kv_lora_rank": 32, "attention__key_length": 40}
    tensors: dict[str, np.ndarray | None] = {}
    types = {}
    for layer, block in enumerate(expected.model.layers):
        weight = block.self_attn.kv_b_proj.weight.data.view(4, 48, 32)
        for name, part in (("k", weight[:, :32].transpose(1, 2)), ("v", weight[:, 32:])):
            stored = f"blk.{layer}.attn_{name}_b.weight"
            types[stored] = gguf.GGMLQuantizationType.Q8_0
            tensors[stored] = blocks = gguf.quantize(part.contiguous().numpy(), types[stored])
            part.copy_(torch.from_numpy(gguf.dequantize(blocks, types[stored])))
    path = write(tmp_path / "tiny.gguf", expected, "deepseek2", tensors, types, **keys)
    for _ in range(2):  # written, read
        assert_same_logits(load(path, weights_cache=str(tmp_path / "cache")), expected)


@pytest.mark.parametrize(
    ("tensors", "keys", "message"),
    [
        (
            {},
            {"attention__kv_lora_rank": None},
            r"metadata key deepseek2\.attention\.kv_lora_rank: .* convert it again",
        ),
        ({}, {"expert_count": None}, r"metadata key deepseek2\.expert_count: .* convert it again"),
        (
            {},
            {"leading_dense_block_count": "1"},
            r"metadata key deepseek2\.leading_dense_block_count: .* convert it again",
        ),
        (
            {},
            {"expert_weights_norm": 1},
            r"metadata key deepseek2\.expert_weights_norm: expected true or false, found 1",
        ),
        ({"blk.1.attn_v_b.weight": None}, {}, r"missing: model\.layers\.1\.self_attn\.v_b_proj\.weight; download"),
        ({"blk.2.exp_probs_b.bias": None}, {}, r"missing: model\.layers\.2\.mlp\.gate\.e_score_correction_bias"),
        (
            {"blk.1.attn_k_b.weight": np.zeros((4, 32, 24), np.float32)},
            {},
            r"self_attn\.k_b_proj\.weight: expected shape \[4, 24, 32\], found \[4, 32, 24\]",
        ),
    ],
)
def test_deepseek_files_that_lack_something(
    tmp_path: Path, tensors: dict[str, np.ndarray | None], keys: dict[str, Any], message: str
) -> None:
    model = deepseek("DeepseekV3", V3)
    path = write(tmp_path / "tiny.gguf", model, "deepseek2", tensors, **(LATENT_KEYS | V3_KEYS | keys))
    with pytest.raises(ModelLoadError, match=rf"tiny\.gguf: .*{message}"):
        load(path)
