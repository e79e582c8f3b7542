"""GGUF files of GPT-OSS and DeepSeek: what llama.cpp's converter does to experts, sinks and latent attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from pagewire.kernels.quantized import PackedGrouped
from pagewire.services.executor.model_config import ModelLoadError
from pagewire.services.executor.models.gpt_oss import GptOssModel
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
